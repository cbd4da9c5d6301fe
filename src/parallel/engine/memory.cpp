#include "parallel/engine/memory.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "core/check.hpp"
#include "core/device.hpp"
#include "core/scalar_io.hpp"
#include "core/shape.hpp"

namespace fovea::parallel {
namespace {

constexpr std::size_t kAlignment = 64;  // a cache line

/// body(offset in each tensor, in elements) of the first element of every row of the last dimension.
template <std::size_t num_tensors, typename Body>
void for_each_row(const std::array<const TensorSpec*, num_tensors>& specs, const Body& body) {
  const TensorSpec& shape = *specs[0];
  if (shape.num_elements() == 0) return;
  std::array<std::int64_t, kMaxRank> index{};
  for (;;) {
    std::array<std::int64_t, num_tensors> offsets{};
    for (std::size_t t = 0; t < num_tensors; ++t) {
      for (std::size_t dim = 0; dim + 1 < static_cast<std::size_t>(shape.rank); ++dim)
        offsets[t] += index[dim] * specs[t]->strides[dim];
    }
    body(offsets);
    int dim = shape.rank - 2;
    for (; dim >= 0; --dim) {
      const auto at = static_cast<std::size_t>(dim);
      if (++index[at] < shape.shape[at]) break;
      index[at] = 0;
    }
    if (dim < 0) return;
  }
}

std::int64_t last_size(const TensorSpec& spec) {
  return spec.shape[static_cast<std::size_t>(spec.rank) - 1];
}
std::int64_t last_stride(const TensorSpec& spec) {
  return spec.strides[static_cast<std::size_t>(spec.rank) - 1];
}

void copy_row(std::byte* to, std::int64_t to_stride, const std::byte* from,
              std::int64_t from_stride, std::int64_t size, std::size_t element_bytes) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(size) * element_bytes);
    return;
  }
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  for (std::int64_t i = 0; i < size; ++i)
    std::memcpy(to + i * to_stride * bytes, from + i * from_stride * bytes, element_bytes);
}

}  // namespace

TensorView part_of(const TensorView& tensor, int dim, std::int64_t begin, std::int64_t end) {
  TensorSpec spec = tensor.spec();
  spec.shape[static_cast<std::size_t>(dim)] = end - begin;
  const std::int64_t bytes =
      begin * tensor.stride(dim) * static_cast<std::int64_t>(size_bytes(tensor.dtype()));
  const bool is_empty = tensor.spec().num_elements() == 0;
  if (!tensor.is_mutable())
    return {static_cast<const std::byte*>(tensor.data()) + (is_empty ? 0 : bytes), spec};
  return {static_cast<std::byte*>(tensor.mutable_data()) + (is_empty ? 0 : bytes), spec};
}

std::size_t num_bytes(const TensorView& contiguous) {
  return static_cast<std::size_t>(contiguous.spec().num_elements()) *
         size_bytes(contiguous.dtype());
}

OwnedTensor Memory::make(Dtype dtype, std::span<const std::int64_t> shape) const {
  if (!is_cpu(device_)) return make_on_device(dtype, shape, *this);
  const TensorSpec spec = make_spec(dtype, shape);
  const std::size_t bytes = static_cast<std::size_t>(spec.num_elements()) * size_bytes(dtype);
  auto* const data =
      static_cast<std::byte*>(::operator new (bytes + kAlignment, std::align_val_t{kAlignment}));
  std::shared_ptr<std::byte> memory(
      data, [](std::byte* p) { ::operator delete (p, std::align_val_t{kAlignment}); });
  return {TensorView(static_cast<void*>(data), spec), std::move(memory)};
}

OwnedTensor Memory::make_like(const TensorView& like, Dtype dtype) const {
  return make(dtype, shape_of(like));
}

OwnedTensor Memory::packed(const TensorView& from) const {
  OwnedTensor result = make_like(from, from.dtype());
  copy(result.view, from);
  return result;
}

OwnedTensor Memory::of_values(std::span<const std::int32_t> values) const {
  if (!is_cpu(device_)) return values_on_device(values, device_);
  OwnedTensor result = make(Dtype::i32, std::array{static_cast<std::int64_t>(values.size())});
  std::ranges::copy(values, static_cast<std::int32_t*>(result.view.mutable_data()));
  return result;
}

void Memory::copy(const TensorView& to, const TensorView& from) const {
  if (!is_cpu(device_)) return sum_on_device(to, std::array{from}, *this);
  const std::size_t element_bytes = size_bytes(from.dtype());
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  for_each_row<2>({&to.spec(), &from.spec()}, [&](const auto& at) {
    copy_row(static_cast<std::byte*>(to.mutable_data()) + at[0] * bytes, last_stride(to.spec()),
             static_cast<const std::byte*>(from.data()) + at[1] * bytes, last_stride(from.spec()),
             last_size(to.spec()), element_bytes);
  });
}

void Memory::sum(const TensorView& to, std::span<const TensorView> parts) const {
  if (!is_cpu(device_)) return sum_on_device(to, parts, *this);
  auto* const written = static_cast<std::byte*>(to.mutable_data());
  const std::int64_t size = last_size(to.spec());
  const OwnedTensor total = make_like(to, Dtype::f32);
  auto* const sums = static_cast<float*>(total.view.mutable_data());
  std::memset(total.memory.get(), 0, num_bytes(total.view));
  for (const TensorView& part : parts) {
    FOVEA_ASSERT(part.dtype() == Dtype::f32);
    for_each_row<2>({&total.view.spec(), &part.spec()}, [&](const auto& at) {
      const float* const from = static_cast<const float*>(part.data()) + at[1];
      for (std::int64_t i = 0; i < size; ++i) sums[at[0] + i] += from[i * last_stride(part.spec())];
    });
  }
  for_each_row<2>({&to.spec(), &total.view.spec()}, [&](const auto& at) {
    for (std::int64_t i = 0; i < size; ++i)
      store_scalar(written, to.dtype(), at[0] + i * last_stride(to.spec()), sums[at[1] + i]);
  });
}

}  // namespace fovea::parallel
