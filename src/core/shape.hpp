// The extents of a tensor as a span.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fovea/tensor.hpp"

namespace fovea {

/// Valid as long as the spec.
inline std::span<const std::int64_t> shape_of(const TensorSpec& spec) {
  return {spec.shape.data(), static_cast<std::size_t>(spec.rank)};
}
inline std::span<const std::int64_t> shape_of(const TensorView& view) {
  return shape_of(view.spec());
}

}  // namespace fovea
