#include "expr/interval_rules.hpp"

#include <algorithm>
#include <cmath>

#include "core/check.hpp"

namespace fovea::expr {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_unbounded(const Interval& a) { return a.lo == -kInfinity || a.hi == kInfinity; }

bool has_zero(const Interval& a) { return a.contains(0); }

// Bounds of an operation that is monotone in each operand alone: its extremes lie in the corners.
template <typename Function>
std::pair<double, double> corners(const Interval& a, const Interval& b, Function f) {
  const double values[] = {f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi)};
  const auto [lo, hi] = std::minmax_element(std::begin(values), std::end(values));
  return {*lo, *hi};
}

double nan_to_zero(double value) { return std::isnan(value) ? 0 : value; }

// ---- ints ----

Interval int_mul(const Interval& a, const Interval& b) {
  const auto [lo, hi] = corners(a, b, [](double x, double y) { return x * y; });
  return wrapped(lo, hi);
}

// The quotient of 32-bit ints in fp64 is never rounded across an integer, so its floor is exact.
Interval floor_div_nonzero(const Interval& a, const Interval& b) {
  const auto [lo, hi] = corners(a, b, [](double x, double y) { return std::floor(x / y); });
  return wrapped(lo, hi);
}

Interval mod_positive(const Interval& a, const Interval& b) {
  if (a.lo >= 0 && a.hi < b.lo) return a;
  if (b.is_point()) {
    const double period = std::floor(a.lo / b.lo);
    if (period == std::floor(a.hi / b.lo)) return {a.lo - period * b.lo, a.hi - period * b.lo};
  }
  return {0, b.hi - 1};
}

Interval negated(const Interval& a) { return {-a.hi, -a.lo, a.may_be_nan}; }

Interval mod_negative(const Interval& a, const Interval& b) {
  return negated(mod_positive(negated(a), negated(b)));
}

// Splits a divisor by sign; division by zero gives 0.
template <typename Negative, typename Positive>
Interval by_divisor(const Interval& b, Negative negative, Positive positive) {
  constexpr Interval kZero = Interval::point(0);
  Interval result = kZero;
  bool is_first = true;
  const auto add = [&](const Interval& part) {
    result = is_first ? part : hull(result, part);
    is_first = false;
  };
  if (b.lo <= -1) add(negative(Interval{b.lo, std::min(b.hi, -1.0)}));
  if (b.hi >= 1) add(positive(Interval{std::max(b.lo, 1.0), b.hi}));
  if (has_zero(b)) add(kZero);
  return result;
}

Interval int_floor_div(const Interval& a, const Interval& b) {
  const auto divide = [&](const Interval& divisor) { return floor_div_nonzero(a, divisor); };
  return by_divisor(b, divide, divide);
}

Interval int_mod(const Interval& a, const Interval& b) {
  return by_divisor(
      b, [&](const Interval& divisor) { return mod_negative(a, divisor); },
      [&](const Interval& divisor) { return mod_positive(a, divisor); });
}

std::int32_t as_int(double value) { return static_cast<std::int32_t>(value); }

// The least 2^k - 1 that is not below the magnitudes of a (a negative x counts as ~x).
double all_ones(const Interval& a) {
  const double magnitude = std::max(a.hi, -1 - a.lo);
  double ones = 0;
  while (ones < magnitude) ones = 2 * ones + 1;
  return ones;
}

Interval bit_not(const Interval& a) { return {-1 - a.hi, -1 - a.lo}; }

// x & (2^k - 1) is x mod 2^k, for negative x as well.
bool is_low_mask(const Interval& a) {
  if (!a.is_point() || a.lo < 0 || a.lo > kAnyInt.hi - 1) return false;
  return (as_int(a.lo) & (as_int(a.lo) + 1)) == 0;
}

// x & -2^k rounds down to a multiple of 2^k, which is monotone.
bool is_high_mask(const Interval& a) {
  if (!a.is_point() || a.lo >= 0 || a.lo < kAnyInt.lo) return false;
  return is_low_mask(Interval::point(-1 - a.lo));
}

Interval rounded_down(const Interval& a, const Interval& mask) {
  return {static_cast<double>(as_int(a.lo) & as_int(mask.lo)),
          static_cast<double>(as_int(a.hi) & as_int(mask.lo))};
}

Interval bit_and(const Interval& a, const Interval& b) {
  if (a.is_point() && b.is_point()) return Interval::point(as_int(a.lo) & as_int(b.lo));
  if (is_low_mask(b)) return mod_positive(a, Interval::point(b.lo + 1));
  if (is_low_mask(a)) return mod_positive(b, Interval::point(a.lo + 1));
  if (is_high_mask(b)) return rounded_down(a, b);
  if (is_high_mask(a)) return rounded_down(b, a);
  // A negative operand can keep all bits of the other one; a non-negative one bounds the result.
  const double hi = a.lo >= 0 && b.lo >= 0 ? std::min(a.hi, b.hi)
                    : a.lo >= 0            ? a.hi
                    : b.lo >= 0            ? b.hi
                                           : std::max(a.hi, b.hi);
  const double lo = a.lo >= 0 || b.lo >= 0 ? 0 : -1 - all_ones(hull(a, b));
  return {lo, hi};
}

Interval bit_xor(const Interval& a, const Interval& b) {
  if (a.is_point() && b.is_point()) return Interval::point(as_int(a.lo) ^ as_int(b.lo));
  const double ones = all_ones(hull(a, b));
  if (a.lo >= 0 && b.lo >= 0) return {0, ones};
  return {-1 - ones, ones};
}

// Amounts are taken modulo 32; a range of them that does not cross a multiple of 32 stays a range.
Interval shift_amounts(const Interval& b) { return mod_positive(b, Interval::point(32)); }

Interval shl(const Interval& a, const Interval& b) {
  const auto [lo, hi] =
      corners(a, shift_amounts(b), [](double x, double s) { return x * std::exp2(s); });
  return wrapped(lo, hi);
}

Interval shr(const Interval& a, const Interval& b) {
  const auto [lo, hi] = corners(a, shift_amounts(b),
                                [](double x, double s) { return std::floor(x * std::exp2(-s)); });
  return {lo, hi};
}

Interval int_rule(Op op, const Interval& a, const Interval& b) {
  switch (op) {
    case Op::add:
      return wrapped(a.lo + b.lo, a.hi + b.hi);
    case Op::sub:
      return wrapped(a.lo - b.hi, a.hi - b.lo);
    case Op::mul:
      return int_mul(a, b);
    case Op::floor_div:
      return int_floor_div(a, b);
    case Op::mod:
      return int_mod(a, b);
    case Op::neg:
      return wrapped(-a.hi, -a.lo);
    case Op::abs:
      return wrapped(std::max({a.lo, -a.hi, 0.0}), std::max(-a.lo, a.hi));
    case Op::min:
      return {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
    case Op::max:
      return {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
    case Op::bit_and:
      return bit_and(a, b);
    case Op::bit_or:
      return bit_not(bit_and(bit_not(a), bit_not(b)));
    case Op::bit_xor:
      return bit_xor(a, b);
    case Op::bit_not:
      return bit_not(a);
    case Op::shl:
      return shl(a, b);
    case Op::shr:
      return shr(a, b);
    default:
      throw InternalError("internal: no interval rule for this op on ints");
  }
}

// ---- floats ----

// exp, log and their kin differ between backends: a few units in the last place, more where fp32
// computes them by way of exp2 or log2 of a rounded product (relative 2^-24 * 128), absolute near a
// zero of the logarithm.
constexpr double kRelativeError = 1e-4;

Interval widened(double lo, double hi, bool may_be_nan, double absolute_error = 1e-37) {
  const auto error = [&](double x) {
    return std::isinf(x) ? 0 : std::abs(x) * kRelativeError + absolute_error;
  };
  return rounded(lo - error(lo), hi + error(hi), may_be_nan);
}

// Kernels may keep a product or a sum unrounded (fused multiply-add), so ends are of real numbers: where fp64 rounds
// one of them, the double beyond it is taken. Else a tie of f32 that fp64 does not see would round the other way.

double beyond(double value, double error, double limit) {
  const bool is_rounded = limit > 0 ? error > 0 : error < 0;
  return std::isfinite(value) && is_rounded ? std::nextafter(value, limit) : value;
}

/// The real sum is x + y + this.
double error_of_sum(double x, double y, double sum) {
  const double y_part = sum - x;
  return (x - (sum - y_part)) + (y - y_part);
}

double sum_towards(double x, double y, double limit) {
  const double sum = x + y;
  return beyond(sum, error_of_sum(x, y, sum), limit);
}

double product_towards(double x, double y, double limit) {
  const double product = x * y;
  return beyond(nan_to_zero(product), std::fma(x, y, -product), limit);
}

Interval float_add(const Interval& a, const Interval& b) {
  const double lo = sum_towards(a.lo, b.lo, -kInfinity);
  const double hi = sum_towards(a.hi, b.hi, kInfinity);
  const bool opposite_infinities =
      (a.hi == kInfinity && b.lo == -kInfinity) || (a.lo == -kInfinity && b.hi == kInfinity);
  return rounded(std::isnan(lo) ? -kInfinity : lo, std::isnan(hi) ? kInfinity : hi,
                 a.may_be_nan || b.may_be_nan || opposite_infinities);
}

Interval float_mul(const Interval& a, const Interval& b) {
  const auto towards = [&](double limit) {
    return corners(a, b, [&](double x, double y) { return product_towards(x, y, limit); });
  };
  const bool zero_by_infinity =
      (has_zero(a) && is_unbounded(b)) || (has_zero(b) && is_unbounded(a));
  return rounded(towards(-kInfinity).first, towards(kInfinity).second,
                 a.may_be_nan || b.may_be_nan || zero_by_infinity);
}

Interval float_div(const Interval& a, const Interval& b) {
  if (has_zero(b)) return Interval::whole();
  const auto [lo, hi] = corners(a, b, [](double x, double y) { return nan_to_zero(x / y); });
  const bool infinity_by_infinity = is_unbounded(a) && is_unbounded(b);
  return rounded(lo, hi, a.may_be_nan || b.may_be_nan || infinity_by_infinity);
}

Interval float_floor(const Interval& a) {
  return {std::floor(a.lo), std::floor(a.hi), a.may_be_nan};
}

// a - b * floor(a / b) in any precision, or the exact remainder.
Interval float_mod(const Interval& a, const Interval& b) {
  const Interval product = float_mul(b, float_floor(float_div(a, b)));
  const Interval remainder{std::min(b.lo, 0.0), std::max(b.hi, 0.0),
                           is_unbounded(a) || is_unbounded(b)};
  return hull(float_add(a, negated(product)), remainder);
}

Interval float_min(const Interval& a, const Interval& b) {
  const bool may_be_nan = a.may_be_nan || b.may_be_nan;
  return {std::min(a.lo, b.lo), may_be_nan ? std::max(a.hi, b.hi) : std::min(a.hi, b.hi),
          may_be_nan};
}

Interval float_max(const Interval& a, const Interval& b) {
  return negated(float_min(negated(a), negated(b)));
}

Interval float_log(const Interval& a, double (*log)(double)) {
  const double lo = a.lo <= 0 ? -kInfinity : log(a.lo);
  const double hi = a.hi <= 0 ? -kInfinity : log(a.hi);
  return widened(lo, hi, a.may_be_nan || a.lo < 0, 1e-6);
}

Interval float_sqrt(const Interval& a) {
  return widened(std::sqrt(std::max(a.lo, 0.0)), std::sqrt(std::max(a.hi, 0.0)),
                 a.may_be_nan || a.lo < 0);
}

Interval float_rsqrt(const Interval& a) {
  if (a.lo <= 0) return Interval::whole();  // -0 gives -inf
  return widened(1 / std::sqrt(a.hi), 1 / std::sqrt(a.lo), a.may_be_nan);
}

Interval float_pow(const Interval& a, const Interval& b) {
  // pow(NaN, 0) is 1, and a base that is not positive has corners of its own.
  if (a.may_be_nan || b.may_be_nan || a.lo <= 0) return Interval::whole();
  if (is_unbounded(a) || is_unbounded(b)) return Interval::whole();
  const auto [lo, hi] = corners(a, b, [](double x, double y) { return std::pow(x, y); });
  return widened(lo, hi, false);
}

/// Between -1 and 1, wherever the operand is.
Interval float_wave(const Interval& a) { return widened(-1, 1, a.may_be_nan || is_unbounded(a)); }

Interval float_log1p(const Interval& a) {
  const double lo = a.lo <= -1 ? -kInfinity : std::log1p(a.lo);
  const double hi = a.hi <= -1 ? -kInfinity : std::log1p(a.hi);
  return widened(lo, hi, a.may_be_nan || a.lo < -1);
}

// No greater than the dividend, whose sign it has, and less than the divisor.
Interval float_fmod(const Interval& a, const Interval& b) {
  const double most = std::max(-b.lo, b.hi);
  return {std::max(std::min(a.lo, 0.0), -most), std::min(std::max(a.hi, 0.0), most),
          a.may_be_nan || b.may_be_nan || is_unbounded(a) || has_zero(b)};
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Interval float_rule(Op op, const Interval& a, const Interval& b) {
  const auto increasing = [&](double (*f)(double)) {
    return widened(f(a.lo), f(a.hi), a.may_be_nan);
  };
  switch (op) {
    case Op::add:
      return float_add(a, b);
    case Op::sub:
      return float_add(a, negated(b));
    case Op::mul:
      return float_mul(a, b);
    case Op::div:
      return float_div(a, b);
    case Op::floor_div:
      return float_floor(float_div(a, b));
    case Op::mod:
      return float_mod(a, b);
    case Op::neg:
      return negated(a);
    case Op::abs:
      return {std::max({a.lo, -a.hi, 0.0}), std::max(-a.lo, a.hi), a.may_be_nan};
    case Op::min:
      return float_min(a, b);
    case Op::max:
      return float_max(a, b);
    case Op::floor:
      return float_floor(a);
    case Op::exp:
      return increasing(std::exp);
    case Op::exp2:
      return increasing(std::exp2);
    case Op::tanh:
      return increasing(std::tanh);
    case Op::sigmoid:
      return increasing(sigmoid);
    case Op::ceil:
      return {std::ceil(a.lo), std::ceil(a.hi), a.may_be_nan};
    case Op::trunc:
      return {std::trunc(a.lo), std::trunc(a.hi), a.may_be_nan};
    case Op::round:
      return {std::nearbyint(a.lo), std::nearbyint(a.hi), a.may_be_nan};
    case Op::sin:
    case Op::cos:
      return float_wave(a);
    case Op::tan:
      return Interval::whole();
    case Op::erf:
      return increasing(std::erf);
    case Op::expm1:
      return increasing(std::expm1);
    case Op::log1p:
      return float_log1p(a);
    case Op::fmod:
      return float_fmod(a, b);
    case Op::log:
      return float_log(a, std::log);
    case Op::log2:
      return float_log(a, std::log2);
    case Op::sqrt:
      return float_sqrt(a);
    case Op::rsqrt:
      return float_rsqrt(a);
    case Op::pow:
      return float_pow(a, b);
    default:
      throw InternalError("internal: no interval rule for this op on floats");
  }
}

}  // namespace

Interval rounded(double lo, double hi, bool may_be_nan) {
  // Rounding is monotone, so that the rounded ends bound every rounded value between them.
  return {std::min(lo, static_cast<double>(static_cast<float>(lo))),
          std::max(hi, static_cast<double>(static_cast<float>(hi))), may_be_nan};
}

Interval int_of(const Interval& a) {
  const auto saturated = [](double x) { return std::trunc(std::clamp(x, kAnyInt.lo, kAnyInt.hi)); };
  const Interval result{saturated(a.lo), saturated(a.hi), false};
  return a.may_be_nan ? hull(result, Interval::point(0)) : result;
}

Interval float_of(const Interval& a) { return rounded(a.lo, a.hi, false); }

Interval number_rule(Op op, ExprType operand_type, const Interval& a, const Interval& b) {
  return operand_type == ExprType::floating ? float_rule(op, a, b) : int_rule(op, a, b);
}

}  // namespace fovea::expr
