// Tensors as kernels take them: an address and strides.
#pragma once

#include "fovea/kv_cache.hpp"
#include "fovea/tensor.hpp"

#include "cuda/device/shared/forward_params.h"
#include "cuda/device/shared/forward_spec.h"
#include "problem/cache.hpp"

namespace fovea::cuda {

/// f32, f16 or bf16.
Element element_of(Dtype dtype);

/// Dense [batch, rows, heads, dim] or packed [rows, heads, dim].
BshdParam bshd(const TensorView& tensor);

/// none: f32, f16 or bf16.
Codes codes_of(Dtype dtype);

/// Of cache.k_scale or cache.v_scale.
ScaleParam scale_param(const TensorView& scale);

/// i32 or i64; of two dimensions the last, whose rows are stride(0) apart. Absent tensors have no data.
IndexParam index_param(const TensorView& tensor);

/// Strides of lse or row_max: [batch, heads, rows], packed [heads, rows]; of absent tensors 0.
struct RowStrides {
  std::int64_t batch = 0, head = 0, row = 0;
};
RowStrides row_strides(const TensorView& tensor);

/// At most what 32 bits count, rounded up to tiles too.
std::int32_t count_param(std::int64_t count);

/// Rows that a sequence of the cache has room for; none in a cache without slots or pages.
std::int32_t capacity_param(const KvCache& cache);

/// Pages of a paged cache: a table, or a list and where each sequence's begin in it.
struct PagesParam {
  IndexParam entries{};
  std::int64_t row_stride = 0;  // of the table; of a list, its entries'
  IndexParam indptr{};
  std::int32_t num_listed = 0;
};
PagesParam pages_param(const KvCache& cache);
/// The same in the fields of a kernel's parameters; of a cache without pages they stay as they are.
template <typename Params>
void fill_pages(const KvCache& cache, Params& p) {
  if (!is_paged(cache)) return;
  const PagesParam pages = pages_param(cache);
  p.page_table = pages.entries;
  p.page_table_row_stride = pages.row_stride;
  p.page_indptr = pages.indptr;
  p.num_listed = pages.num_listed;
  p.page_size = static_cast<std::int32_t>(cache.k.size(1));
}

/// Whether every row is whole 16-byte pieces that start at multiples of 16 bytes.
bool is_aligned(const TensorView& tensor);
/// The same of a tensor that starts at one.
bool has_aligned_rows(const TensorSpec& spec);

}  // namespace fovea::cuda
