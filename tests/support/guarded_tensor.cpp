#include "support/guarded_tensor.hpp"

#include <algorithm>
#include <cstring>

#include "quant/formats.hpp"

namespace fovea::testing {

namespace {

constexpr std::byte kPoison{0xFF};        // 0xFFFF and 0xFFFFFFFF are NaN in f16, bf16, f32
constexpr std::size_t kGuardBytes = 256;  // four of the widest vectors
constexpr std::size_t kAlignment = 64;

struct Extent {
  std::int64_t first = 0, last = -1;  // offsets of elements, both inclusive
};

Extent extent_of(const TensorSpec& spec) {
  if (spec.num_elements() == 0) return {};
  Extent extent{.first = 0, .last = 0};
  for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rank); ++i) {
    const std::int64_t reach = (spec.shape[i] - 1) * spec.strides[i];
    (reach < 0 ? extent.first : extent.last) += reach;
  }
  return extent;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

void store_as(Dtype dtype, std::byte* at, double value) {
  switch (dtype) {
    case Dtype::f32:
      return store(at, static_cast<float>(value));
    case Dtype::f16:
      return store(at, float16(static_cast<float>(value)));
    case Dtype::bf16:
      return store(at, bfloat16(static_cast<float>(value)));
    case Dtype::boolean:
    case Dtype::u8:
      return store(at, static_cast<std::uint8_t>(value));
    case Dtype::i8:
      return store(at, static_cast<std::int8_t>(value));
    case Dtype::i32:
      return store(at, static_cast<std::int32_t>(value));
    case Dtype::i64:
      return store(at, static_cast<std::int64_t>(value));
    case Dtype::e4m3:
      return store(at, quant::e4m3_bits(static_cast<float>(value)));
  }
}

}  // namespace

void for_each_offset(const TensorSpec& spec, const std::function<void(std::int64_t)>& f) {
  std::array<std::int64_t, kMaxRank> index{};
  for (std::int64_t i = 0; i < spec.num_elements(); ++i) {
    std::int64_t offset = 0;
    for (std::size_t dim = 0; dim < static_cast<std::size_t>(spec.rank); ++dim) {
      offset += index[dim] * spec.strides[dim];
    }
    f(offset);
    for (auto dim = static_cast<std::size_t>(spec.rank); dim-- > 0;) {
      if (++index[dim] < spec.shape[dim]) break;
      index[dim] = 0;
    }
  }
}

GuardedTensor::GuardedTensor(const TensorSpec& spec, std::int64_t offset) {
  const Extent extent = extent_of(spec);
  const std::size_t element = size_bytes(spec.dtype);
  const std::size_t used =
      static_cast<std::size_t>(extent.last - extent.first + 1 + offset) * element;
  bytes_.assign(used + 2 * kGuardBytes + kAlignment, kPoison);
  const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + kGuardBytes;
  const std::size_t start = kGuardBytes + (kAlignment - address % kAlignment) % kAlignment;
  origin_ = start + static_cast<std::size_t>(offset - extent.first) * element;
  inputs_view_ = TensorView(static_cast<const void*>(bytes_.data() + origin_), spec);
  outputs_view_ = TensorView(static_cast<void*>(bytes_.data() + origin_), spec);
  seal();
}

void GuardedTensor::set(std::int64_t element_offset, double value) {
  const auto element = static_cast<std::int64_t>(size_bytes(inputs_view_.dtype()));
  store_as(inputs_view_.dtype(),
           bytes_.data() + static_cast<std::int64_t>(origin_) + element_offset * element, value);
}

void GuardedTensor::fill(const std::function<double(std::int64_t)>& value) {
  std::int64_t i = 0;
  for_each_offset(inputs_view_.spec(), [&](std::int64_t offset) { set(offset, value(i++)); });
  seal();
}

void GuardedTensor::poison() {
  std::fill(bytes_.begin(), bytes_.end(), kPoison);
  seal();
}

bool GuardedTensor::has_intact_guards() const {
  if (!inputs_view_) return true;
  std::vector<std::byte> healed = bytes_;
  const std::size_t element = size_bytes(inputs_view_.dtype());
  for_each_offset(inputs_view_.spec(), [&](std::int64_t offset) {
    const auto at = static_cast<std::size_t>(static_cast<std::int64_t>(origin_) +
                                             offset * static_cast<std::int64_t>(element));
    std::copy_n(sealed_.begin() + static_cast<std::ptrdiff_t>(at), element,
                healed.begin() + static_cast<std::ptrdiff_t>(at));
  });
  return healed == sealed_;
}

}  // namespace fovea::testing
