#include "cuda/tensor_maps.hpp"

#include <fmt/format.h>

#include <cstring>

namespace fovea::cuda {
namespace {

/// TMA's strides are multiples of 16 bytes.
constexpr std::int64_t kStrideElements = 8;

}  // namespace

TensorMapEncoder encoder_of(const driver::Driver& driver) {
  return [&driver](const driver::TensorMapSpec& spec, const void* address) {
    const driver::TensorMap map = driver::encode_tiled(driver, spec, address);
    TensorMapParam param;
    static_assert(sizeof(param) == sizeof(map));
    std::memcpy(&param, &map, sizeof(param));
    return param;
  };
}

std::string why_no_tensor_map(std::string_view label, const TensorSpec& spec) {
  const auto last = static_cast<std::size_t>(spec.rank) - 1;
  if (spec.shape[last] % kStrideElements != 0) {
    return fmt::format("{} has head_dim {}; expected a multiple of {}", label, spec.shape[last],
                       kStrideElements);
  }
  if (spec.strides[last] != 1) {
    return fmt::format("{} has stride {} along head_dim; expected 1", label, spec.strides[last]);
  }
  for (std::size_t dim = 0; dim < last; ++dim) {
    if (spec.shape[dim] > 1 &&
        (spec.strides[dim] <= 0 || spec.strides[dim] % kStrideElements != 0)) {
      return fmt::format("{} has stride {} in dimension {}; expected a positive multiple of {}",
                         label, spec.strides[dim], dim, kStrideElements);
    }
  }
  return "";
}

TensorMapParam tensor_map(const TensorMapEncoder& encode, const TensorView& t, std::int64_t rows,
                          std::int64_t heads) {
  driver::TensorMapSpec spec{
      .element =
          t.dtype() == Dtype::f16 ? driver::TensorMapElement::f16 : driver::TensorMapElement::bf16,
      .rank = 4,
      .box = {static_cast<std::uint32_t>(kPanelElements), static_cast<std::uint32_t>(rows),
              static_cast<std::uint32_t>(heads), 1}};
  const int last = t.rank() - 1;
  const int order[] = {last, last - 2, last - 1, last - 3};  // innermost first
  for (std::size_t i = 0; i < 4; ++i) {
    const int dim = order[i];
    const std::int64_t size = dim >= 0 ? t.size(dim) : 1;
    // The stride of a dimension of one element is never walked, but must be one that TMA has.
    const std::int64_t stride = size > 1 ? t.stride(dim) : kStrideElements;
    spec.shape[i] = static_cast<std::uint64_t>(size);
    spec.stride_bytes[i] = static_cast<std::uint64_t>(stride) * size_bytes(t.dtype());
  }
  return encode(spec, t.data());
}

}  // namespace fovea::cuda
