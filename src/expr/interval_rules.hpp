// What each op makes of intervals, one function per op or family. interval.hpp walks a formula with them.
#pragma once

#include "expr/interval.hpp"

namespace fovea::expr {

/// Everything that an int can be.
inline constexpr Interval kAnyInt = {-2147483648.0, 2147483647.0, false};
inline constexpr Interval kAnyBool = {0, 1, false};

/// Bounds of ints before wrapping: all of 32 bits when they may leave them.
Interval wrapped(double lo, double hi);

/// The result of `op` on operands of `operand_type`; unary ops ignore b. Not for leaves, select and conversions.
Interval apply_rule(Op op, ExprType operand_type, const Interval& a, const Interval& b);

Interval int_of(const Interval& a);    // of a float or bool
Interval float_of(const Interval& a);  // of an int or bool
Interval hull(const Interval& a, const Interval& b);

/// A double as fp32 or fp64 evaluation may see it.
Interval rounded(double lo, double hi, bool may_be_nan);

}  // namespace fovea::expr
