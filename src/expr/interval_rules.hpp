// What each op makes of intervals, one function per op or family. interval.hpp walks a formula with
// them.
//
// Masks are mostly sums, comparisons and logic: their rules are inline, and a block map of 10^5
// tiles spends its time here.
#pragma once

#include <algorithm>

#include "expr/interval.hpp"

namespace fovea::expr {

/// Everything that an int can be.
inline constexpr Interval kAnyInt = {-2147483648.0, 2147483647.0, false};
inline constexpr Interval kAnyBool = {0, 1, false};

/// Bounds of ints before wrapping: all of 32 bits when they may leave them.
inline Interval wrapped(double lo, double hi) {
  if (lo < kAnyInt.lo || hi > kAnyInt.hi) return kAnyInt;
  return {lo, hi, false};
}

inline Interval hull(const Interval& a, const Interval& b) {
  return {std::min(a.lo, b.lo), std::max(a.hi, b.hi), a.may_be_nan || b.may_be_nan};
}

inline Interval truth(bool can_be_true, bool can_be_false) {
  return {can_be_false ? 0.0 : 1.0, can_be_true ? 1.0 : 0.0, false};
}

/// A NaN makes every comparison false but !=, which it makes true.
inline Interval compare_rule(Op op, const Interval& a, const Interval& b) {
  const bool nan = a.may_be_nan || b.may_be_nan;
  const bool disjoint = a.hi < b.lo || b.hi < a.lo;
  const bool one_value = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
  switch (op) {
    case Op::lt:
      return truth(a.lo < b.hi, a.hi >= b.lo || nan);
    case Op::le:
      return truth(a.lo <= b.hi, a.hi > b.lo || nan);
    case Op::gt:
      return truth(b.lo < a.hi, b.hi >= a.lo || nan);
    case Op::ge:
      return truth(b.lo <= a.hi, b.hi > a.lo || nan);
    case Op::eq:
      return truth(!disjoint, !one_value || nan);
    default:
      return truth(!one_value || nan, !disjoint);
  }
}

/// Everything that is not a comparison or logic.
Interval number_rule(Op op, ExprType operand_type, const Interval& a, const Interval& b);

/// The result of `op` on operands of `operand_type`; unary ops ignore b. Not for leaves, select and
/// conversions.
inline Interval apply_rule(Op op, ExprType operand_type, const Interval& a, const Interval& b) {
  switch (op) {
    case Op::lt:
    case Op::le:
    case Op::gt:
    case Op::ge:
    case Op::eq:
    case Op::ne:
      return compare_rule(op, a, b);
    case Op::logical_and:
      return {std::min(a.lo, b.lo), std::min(a.hi, b.hi), false};
    case Op::logical_or:
      return {std::max(a.lo, b.lo), std::max(a.hi, b.hi), false};
    case Op::logical_not:
      return {1 - a.hi, 1 - a.lo, false};
    case Op::add:
      if (operand_type == ExprType::integer) return wrapped(a.lo + b.lo, a.hi + b.hi);
      break;
    case Op::sub:
      if (operand_type == ExprType::integer) return wrapped(a.lo - b.hi, a.hi - b.lo);
      break;
    default:
      break;
  }
  return number_rule(op, operand_type, a, b);
}

Interval int_of(const Interval& a);    // of a float or bool
Interval float_of(const Interval& a);  // of an int or bool

/// A double as fp32 or fp64 evaluation may see it.
Interval rounded(double lo, double hi, bool may_be_nan);

}  // namespace fovea::expr
