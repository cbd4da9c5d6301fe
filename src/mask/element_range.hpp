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

/// Rows of bools side by side, `row_stride` bytes apart.
struct BoolRows {
  const std::uint8_t* first = nullptr;
  std::int64_t num_rows = 1;
  std::int64_t row_stride = 0;
  std::int64_t num_cols = 1;
};

/// The same of a rectangle, a word at a time; stops where both have been met.
expr::Interval range_of_bool_rows(const BoolRows& rows);

}  // namespace fovea::mask
