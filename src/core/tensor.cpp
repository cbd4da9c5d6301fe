#include "fovea/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/check.hpp"

namespace fovea {

TensorSpec make_spec(Dtype dtype, std::span<const std::int64_t> shape,
                     std::span<const std::int64_t> strides) {
  if (shape.size() > kMaxRank) {
    invalid("", fmt::format("tensor rank is {}; expected at most {}", shape.size(), kMaxRank));
  }
  if (!strides.empty() && strides.size() != shape.size()) {
    invalid("", fmt::format("tensor has {} strides for {} dimensions; expected one each",
                            strides.size(), shape.size()));
  }
  TensorSpec spec{.dtype = dtype, .rank = static_cast<int>(shape.size())};
  std::int64_t row_major = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] < 0) {
      invalid("", fmt::format("tensor dimension {} is {}; expected >= 0", i, shape[i]));
    }
    spec.shape[i] = shape[i];
    spec.strides[i] = strides.empty() ? row_major : strides[i];
    if (shape[i] > 0 && __builtin_mul_overflow(row_major, shape[i], &row_major)) {
      invalid("",
              fmt::format("tensor shape [{}] has more than 2^63 elements", fmt::join(shape, ", ")));
    }
  }
  return spec;
}

std::string to_string(Device device) {
  return device.kind == Device::Kind::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

std::string to_string(const TensorSpec& spec) {
  const auto rank = static_cast<std::size_t>(spec.rank);
  const std::span shape(spec.shape.data(), rank);
  const std::span strides(spec.strides.data(), rank);
  const TensorSpec row_major = make_spec(spec.dtype, shape);
  std::string text = fmt::format("{} [{}]", name(spec.dtype), fmt::join(shape, ", "));
  if (row_major.strides != spec.strides)
    text += fmt::format(" strides [{}]", fmt::join(strides, ", "));
  return text;
}

TensorView TensorView::permuted(std::initializer_list<int> order) const {
  std::uint32_t seen = 0;
  for (const int dim : order) {
    if (dim < 0 || dim >= spec_.rank || (seen & (1U << dim)) != 0) {
      invalid("", fmt::format("permuted order is ({}); expected each of 0..{} once",
                              fmt::join(order, ", "), spec_.rank - 1));
    }
    seen |= 1U << dim;
  }
  if (static_cast<int>(order.size()) != spec_.rank) {
    invalid("",
            fmt::format("permuted order has {} dimensions; expected {}", order.size(), spec_.rank));
  }
  TensorView result = *this;
  std::size_t to = 0;
  for (const int from : order) {
    result.spec_.shape[to] = spec_.shape[static_cast<std::size_t>(from)];
    result.spec_.strides[to] = spec_.strides[static_cast<std::size_t>(from)];
    ++to;
  }
  return result;
}

}  // namespace fovea
