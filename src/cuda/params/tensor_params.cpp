#include "cuda/params/tensor_params.hpp"

#include <algorithm>
#include <bit>

#include "problem/cache.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kAlignedBytes = 16;

}  // namespace

Element element_of(Dtype dtype) {
  if (dtype == Dtype::f32) return Element::f32;
  return dtype == Dtype::f16 ? Element::f16 : Element::bf16;
}

BshdParam bshd(const TensorView& t) {
  const int last = t.rank() - 1;
  return {.data = t.data(),
          .batch_stride = t.rank() == 4 ? t.stride(0) : 0,
          .row_stride = t.stride(last - 2),
          .head_stride = t.stride(last - 1),
          .col_stride = t.stride(last)};
}

Codes codes_of(Dtype dtype) {
  if (dtype == Dtype::i8) return Codes::int8;
  return dtype == Dtype::e4m3 ? Codes::e4m3 : Codes::none;
}

ScaleParam scale_param(const TensorView& scale) {
  const RowScales scales = row_scales(scale);
  return {.data = scales.data,
          .sequence_stride = scales.sequence_stride,
          .slot_stride = scales.slot_stride,
          .row_stride = scales.row_stride,
          .head_stride = scales.head_stride,
          .are_of_rows = scales.are_of_rows};
}

IndexParam index_param(const TensorView& t) {
  if (!t) return {};
  return {.data = t.data(), .stride = t.stride(t.rank() - 1), .is_wide = t.dtype() == Dtype::i64};
}

RowStrides row_strides(const TensorView& t) {
  if (!t) return {};
  const int last = t.rank() - 1;
  return {t.rank() == 3 ? t.stride(0) : 0, t.stride(last - 1), t.stride(last)};
}

std::int32_t count_param(std::int64_t count) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(count, 0, kMostCounted));
}

std::int32_t capacity_param(const KvCache& cache) {
  return cache.k.size(0) == 0 ? 0 : count_param(cache_capacity(cache));
}

PagesParam pages_param(const KvCache& cache) {
  if (cache.page_table)
    return {.entries = index_param(cache.page_table), .row_stride = cache.page_table.stride(0)};
  return {.entries = index_param(cache.page_indices),
          .row_stride = cache.page_indices.stride(0),
          .indptr = index_param(cache.page_indptr),
          .num_listed = count_param(cache.page_indices.size(0))};
}

bool is_aligned(const TensorView& t) {
  return std::bit_cast<std::uintptr_t>(t.data()) % kAlignedBytes == 0 && has_aligned_rows(t.spec());
}

bool has_aligned_rows(const TensorSpec& spec) {
  const auto last = static_cast<std::size_t>(spec.rank) - 1;
  const auto bytes = static_cast<std::int64_t>(size_bytes(spec.dtype));
  if (spec.shape[last] * bytes % kAlignedBytes != 0 || spec.strides[last] != 1) return false;
  for (std::size_t dim = 0; dim < last; ++dim) {
    if (spec.shape[dim] > 1 && spec.strides[dim] * bytes % kAlignedBytes != 0) return false;
  }
  return true;
}

}  // namespace fovea::cuda
