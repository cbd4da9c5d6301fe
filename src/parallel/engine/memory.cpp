#include "parallel/engine/memory.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

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

void copy_index(const TensorView& to, const TensorView& from) {
  const std::size_t element_bytes = size_bytes(from.dtype());
  const auto bytes = static_cast<std::int64_t>(element_bytes);
  for_each_row<2>({&to.spec(), &from.spec()}, [&](const auto& at) {
    copy_row(static_cast<std::byte*>(to.mutable_data()) + at[0] * bytes, last_stride(to.spec()),
             static_cast<const std::byte*>(from.data()) + at[1] * bytes, last_stride(from.spec()),
             last_size(to.spec()), element_bytes);
  });
}

std::size_t num_elements_of_index(const TensorView& tensor) {
  const std::int64_t tokens = std::max<std::int64_t>(tensor.size(0), 1);
  return static_cast<std::size_t>(tensor.spec().num_elements() / tokens);
}

std::int64_t place_of(const TensorView& places, std::int64_t i) {
  return static_cast<const std::int32_t*>(places.data())[i];
}

/// Of one index of the first dimension; `sums` is memory for it.
void sum_of_index(const TensorView& to, std::span<const TensorView> parts, std::span<float> sums) {
  if (parts.size() == 1 && parts[0].dtype() == to.dtype()) return copy_index(to, parts[0]);
  const TensorView total(static_cast<void*>(sums.data()), make_spec(Dtype::f32, shape_of(to)));
  std::ranges::fill(sums, 0.0F);
  const std::int64_t size = last_size(to.spec());
  for (const TensorView& part : parts) {
    for_each_row<2>({&total.spec(), &part.spec()}, [&](const auto& at) {
      for (std::int64_t i = 0; i < size; ++i)
        sums[static_cast<std::size_t>(at[0] + i)] +=
            load_scalar(static_cast<const std::byte*>(part.data()), part.dtype(),
                        at[1] + i * last_stride(part.spec()));
    });
  }
  for_each_row<2>({&to.spec(), &total.spec()}, [&](const auto& at) {
    for (std::int64_t i = 0; i < size; ++i) {
      store_scalar(static_cast<std::byte*>(to.mutable_data()), to.dtype(),
                   at[0] + i * last_stride(to.spec()), sums[static_cast<std::size_t>(at[1] + i)]);
    }
  });
}

bool is_row_major(const TensorView& tensor) {
  std::int64_t stride = 1;
  for (int dim = tensor.rank() - 1; dim >= 0; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != stride) return false;
    stride *= tensor.size(dim);
  }
  return true;
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

OwnedTensor Memory::row_major(const OwnedTensor& from) const {
  if (is_row_major(from.view)) return from;
  OwnedTensor result = make_like(from.view, from.view.dtype());
  copy(result.view, from.view);
  return result;
}

OwnedTensor Memory::of_values(std::span<const std::int32_t> values) const {
  if (!is_cpu(device_)) return values_on_device(values, device_);
  OwnedTensor result = make(Dtype::i32, std::array{static_cast<std::int64_t>(values.size())});
  std::ranges::copy(values, static_cast<std::int32_t*>(result.view.mutable_data()));
  return result;
}

void Memory::copy(const TensorView& to, const TensorView& from) const {
  sum(to, std::array{PlacedPart{from}});
}

void Memory::sum(const TensorView& to, std::span<const TensorView> parts) const {
  std::vector<PlacedPart> placed;
  for (const TensorView& part : parts) placed.push_back({part});
  sum(to, placed);
}

void Memory::largest(const TensorView& to, std::span<const TensorView> parts) const {
  if (!is_cpu(device_)) return largest_on_device(to, parts, *this);
  copy(to, parts[0]);
  const std::int64_t size = last_size(to.spec());
  for (const TensorView& part : parts.subspan(1)) {
    for_each_row<2>({&to.spec(), &part.spec()}, [&](const auto& at) {
      auto* const into = static_cast<float*>(to.mutable_data()) + at[0];
      const auto* const from = static_cast<const float*>(part.data()) + at[1];
      for (std::int64_t i = 0; i < size; ++i) {
        float& x = into[i * last_stride(to.spec())];
        const float y = from[i * last_stride(part.spec())];
        if (!(y <= x) && !std::isnan(x)) x = y;
      }
    });
  }
}

void Memory::sum(const TensorView& to, std::span<const PlacedPart> parts) const {
  if (!is_cpu(device_)) return sum_on_device(to, parts, *this);
  std::vector<float> sums(num_elements_of_index(to));
  std::vector<TensorView> found;
  for (std::int64_t i = 0; i < to.size(0); ++i) {
    found.clear();
    for (const PlacedPart& part : parts) {
      const std::int64_t at = part.places ? place_of(part.places, i) : i;
      if (at >= 0) found.push_back(part_of(part.tensor, 0, at, at + 1));
    }
    sum_of_index(part_of(to, 0, i, i + 1), found, sums);
  }
}

}  // namespace fovea::parallel
