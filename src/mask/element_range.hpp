// Least and greatest of a tensor's elements, as a program sees them: i64 saturated to 32 bits, NaN reported beside the
// bounds. Read range_table.hpp next.
#pragma once

#include <cstdint>

#include "fovea/tensor.hpp"

#include "expr/interval.hpp"

namespace fovea::mask {

/// What an element of this dtype can be when nothing is known of the data.
expr::Interval range_of_dtype(Dtype dtype);

/// The least interval that contains both.
expr::Interval hull(const expr::Interval& a, const expr::Interval& b);

/// `count` >= 1 elements, `stride` apart, the first at `offset` (both in elements).
struct ElementSpan {
  std::int64_t offset = 0;
  std::int64_t count = 1;
  std::int64_t stride = 1;
};

/// Bounds of the elements of a span; reads each once, or one where the stride is 0.
expr::Interval range_of_elements(const TensorView& view, const ElementSpan& span);

}  // namespace fovea::mask
