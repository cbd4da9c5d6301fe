// Ranges of ints, floats and bools, and the operations of program.cuh on them: what printed tile kinds compute with.
// The rules are those of src/expr/interval_rules.cpp, one by one: a range holds every value that evaluation anywhere in
// the tile can give. Read captured_range.cuh for ranges of what a tensor holds.
//
// Ints are bounded in 64 bits before they wrap; one that may leave 32 bits can be anything. Floats are bounded in fp64,
// widened to what fp32 may round to: few masks have any.
#pragma once

#include "common/position.cuh"
#include "common/program.cuh"

namespace fovea::cuda::program {

/// [lo, hi], both included.
struct IntRange {
  std::int64_t lo, hi;
  FOVEA_DEVICE_MEMBER IntRange(std::int64_t first, std::int64_t last) : lo(first), hi(last) {}
  FOVEA_DEVICE_MEMBER IntRange(Int a) : lo(a.value), hi(a.value) {}  // NOLINT: an int is a range
  FOVEA_DEVICE_MEMBER IntRange(std::int32_t a) : lo(a), hi(a) {}     // NOLINT: literals
  FOVEA_DEVICE_MEMBER bool is_point() const { return lo == hi; }
  FOVEA_DEVICE_MEMBER bool contains(std::int64_t a) const { return lo <= a && a <= hi; }
};

/// [lo, hi], and perhaps NaN.
struct FloatRange {
  double lo, hi;
  bool may_be_nan;
  FOVEA_DEVICE_MEMBER FloatRange(double first, double last, bool nan)
      : lo(first), hi(last), may_be_nan(nan) {}
  FOVEA_DEVICE_MEMBER FloatRange(float a)  // NOLINT: a float is a range
      : lo(is_nan(a) ? -infinity() : a), hi(is_nan(a) ? infinity() : a), may_be_nan(is_nan(a)) {}
};

struct Truth {
  bool can_be_true, can_be_false;
  FOVEA_DEVICE_MEMBER Truth(bool can_hold, bool can_fail)
      : can_be_true(can_hold), can_be_false(can_fail) {}
  FOVEA_DEVICE_MEMBER Truth(bool a) : can_be_true(a), can_be_false(!a) {}  // NOLINT: a bool is one
};

FOVEA_DEVICE TileKind kind_of(Truth visible) {
  if (!visible.can_be_false) return TileKind::full;
  return visible.can_be_true ? TileKind::partial : TileKind::empty;
}

FOVEA_DEVICE IntRange any_int() { return {kLeastInt, kGreatestInt}; }
FOVEA_DEVICE FloatRange any_float() { return {-infinity(), infinity(), true}; }
FOVEA_DEVICE Truth any_bool() { return {true, true}; }
FOVEA_DEVICE bool is_any(IntRange a) { return a.lo == kLeastInt && a.hi == kGreatestInt; }

template <class T>
FOVEA_DEVICE T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FOVEA_DEVICE T greatest(T a, T b) {
  return a < b ? b : a;
}

FOVEA_DEVICE IntRange hull(IntRange a, IntRange b) {
  return {least(a.lo, b.lo), greatest(a.hi, b.hi)};
}
FOVEA_DEVICE FloatRange hull(FloatRange a, FloatRange b) {
  return {least(a.lo, b.lo), greatest(a.hi, b.hi), a.may_be_nan || b.may_be_nan};
}
FOVEA_DEVICE Truth hull(Truth a, Truth b) {
  return {a.can_be_true || b.can_be_true, a.can_be_false || b.can_be_false};
}

// ---- logic and comparisons ---------------------------------------------------------------------

FOVEA_DEVICE Truth operator&&(Truth a, Truth b) {
  return {a.can_be_true && b.can_be_true, a.can_be_false || b.can_be_false};
}
FOVEA_DEVICE Truth operator||(Truth a, Truth b) {
  return {a.can_be_true || b.can_be_true, a.can_be_false && b.can_be_false};
}
FOVEA_DEVICE Truth operator!(Truth a) { return {a.can_be_false, a.can_be_true}; }

FOVEA_DEVICE Truth operator==(Truth a, Truth b) {
  return {(a.can_be_true && b.can_be_true) || (a.can_be_false && b.can_be_false),
          (a.can_be_true && b.can_be_false) || (a.can_be_false && b.can_be_true)};
}
FOVEA_DEVICE Truth operator!=(Truth a, Truth b) { return !(a == b); }

FOVEA_DEVICE Truth operator<(IntRange a, IntRange b) { return {a.lo < b.hi, a.hi >= b.lo}; }
FOVEA_DEVICE Truth operator<=(IntRange a, IntRange b) { return {a.lo <= b.hi, a.hi > b.lo}; }
FOVEA_DEVICE Truth operator>(IntRange a, IntRange b) { return b < a; }
FOVEA_DEVICE Truth operator>=(IntRange a, IntRange b) { return b <= a; }
FOVEA_DEVICE Truth operator==(IntRange a, IntRange b) {
  const bool is_disjoint = a.hi < b.lo || b.hi < a.lo;
  return {!is_disjoint, !(a.is_point() && b.is_point() && a.lo == b.lo)};
}
FOVEA_DEVICE Truth operator!=(IntRange a, IntRange b) { return !(a == b); }

/// A NaN makes every comparison false but !=, which it makes true.
FOVEA_DEVICE Truth operator<(FloatRange a, FloatRange b) {
  return {a.lo < b.hi, a.hi >= b.lo || a.may_be_nan || b.may_be_nan};
}
FOVEA_DEVICE Truth operator<=(FloatRange a, FloatRange b) {
  return {a.lo <= b.hi, a.hi > b.lo || a.may_be_nan || b.may_be_nan};
}
FOVEA_DEVICE Truth operator>(FloatRange a, FloatRange b) { return b < a; }
FOVEA_DEVICE Truth operator>=(FloatRange a, FloatRange b) { return b <= a; }
FOVEA_DEVICE Truth operator==(FloatRange a, FloatRange b) {
  const bool is_disjoint = a.hi < b.lo || b.hi < a.lo;
  const bool is_one_value = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
  return {!is_disjoint, !is_one_value || a.may_be_nan || b.may_be_nan};
}
FOVEA_DEVICE Truth operator!=(FloatRange a, FloatRange b) { return !(a == b); }

/// a == a: a NaN alone does not equal itself.
FOVEA_DEVICE Truth equals_itself(FloatRange a) { return {true, a.may_be_nan}; }
FOVEA_DEVICE Truth equals_itself(IntRange) { return true; }
FOVEA_DEVICE Truth equals_itself(Truth) { return true; }

template <class Range>
FOVEA_DEVICE Range select_range(Truth condition, Range a, Range b) {
  if (!condition.can_be_false) return a;
  return condition.can_be_true ? hull(a, b) : b;
}
FOVEA_DEVICE IntRange select(Truth condition, IntRange a, IntRange b) {
  return select_range(condition, a, b);
}
FOVEA_DEVICE FloatRange select(Truth condition, FloatRange a, FloatRange b) {
  return select_range(condition, a, b);
}
FOVEA_DEVICE Truth select(Truth condition, Truth a, Truth b) {
  return select_range(condition, a, b);
}

// ---- ints --------------------------------------------------------------------------------------

FOVEA_DEVICE IntRange wrapped(IntRange a) {
  return a.lo < kLeastInt || a.hi > kGreatestInt ? any_int() : a;
}

/// The extremes of an operation that is monotone in each operand alone lie in the corners.
template <class Corner>
FOVEA_DEVICE IntRange corners(IntRange a, IntRange b, Corner f) {
  const std::int64_t ll = f(a.lo, b.lo), lh = f(a.lo, b.hi), hl = f(a.hi, b.lo), hh = f(a.hi, b.hi);
  return {least(least(ll, lh), least(hl, hh)), greatest(greatest(ll, lh), greatest(hl, hh))};
}

FOVEA_DEVICE IntRange operator+(IntRange a, IntRange b) {
  return wrapped({a.lo + b.lo, a.hi + b.hi});
}
FOVEA_DEVICE IntRange operator-(IntRange a, IntRange b) {
  return wrapped({a.lo - b.hi, a.hi - b.lo});
}
FOVEA_DEVICE IntRange operator-(IntRange a) { return wrapped({-a.hi, -a.lo}); }
FOVEA_DEVICE IntRange operator*(IntRange a, IntRange b) {
  return wrapped(corners(a, b, [](std::int64_t x, std::int64_t y) { return x * y; }));
}

FOVEA_DEVICE IntRange min(IntRange a, IntRange b) { return {least(a.lo, b.lo), least(a.hi, b.hi)}; }
FOVEA_DEVICE IntRange max(IntRange a, IntRange b) {
  return {greatest(a.lo, b.lo), greatest(a.hi, b.hi)};
}
FOVEA_DEVICE IntRange abs(IntRange a) {
  const std::int64_t zero = 0;
  return wrapped({greatest(greatest(a.lo, -a.hi), zero), greatest(-a.lo, a.hi)});
}

/// Rounds to -inf, for divisors above 0. Magnitudes are at most 2^31, so 32 bits divide.
FOVEA_DEVICE std::int64_t floor_quotient(std::int64_t a, std::int64_t b) {
  const auto divisor = static_cast<std::uint32_t>(b);
  if (a >= 0) return static_cast<std::uint32_t>(a) / divisor;
  return -static_cast<std::int64_t>((static_cast<std::uint32_t>(-a) + (divisor - 1)) / divisor);
}

/// For divisors above 0, which move quotients towards 0 as they grow.
FOVEA_DEVICE IntRange floor_div_positive(IntRange a, IntRange b) {
  return wrapped({floor_quotient(a.lo, a.lo >= 0 ? b.hi : b.lo),
                  floor_quotient(a.hi, a.hi >= 0 ? b.lo : b.hi)});
}

FOVEA_DEVICE IntRange mod_positive(IntRange a, IntRange b) {
  if (a.lo >= 0 && a.hi < b.lo) return a;
  if (b.is_point()) {
    const std::int64_t period = floor_quotient(a.lo, b.lo);
    if (period == floor_quotient(a.hi, b.lo)) return {a.lo - period * b.lo, a.hi - period * b.lo};
  }
  return {0, b.hi - 1};
}

FOVEA_DEVICE IntRange negated(IntRange a) { return {-a.hi, -a.lo}; }

/// Splits a divisor by sign; division by zero gives 0.
template <class Negative, class Positive>
FOVEA_DEVICE IntRange by_divisor(IntRange b, Negative negative, Positive positive) {
  const std::int64_t one = 1;
  const IntRange zero(0);
  IntRange result = zero;
  if (b.hi >= 1) result = positive(IntRange(greatest(b.lo, one), b.hi));
  if (b.lo <= -1) {
    const IntRange below = negative(IntRange(b.lo, least(b.hi, -one)));
    result = b.hi >= 1 ? hull(result, below) : below;
  }
  return b.contains(0) ? hull(result, zero) : result;
}

FOVEA_DEVICE IntRange floor_div(IntRange a, IntRange b) {
  return by_divisor(
      b, [&](IntRange d) { return floor_div_positive(negated(a), negated(d)); },
      [&](IntRange d) { return floor_div_positive(a, d); });
}

FOVEA_DEVICE IntRange mod(IntRange a, IntRange b) {
  return by_divisor(
      b, [&](IntRange d) { return negated(mod_positive(negated(a), negated(d))); },
      [&](IntRange d) { return mod_positive(a, d); });
}

/// The least 2^k - 1 that is not below the magnitudes of a; a negative x counts as ~x.
FOVEA_DEVICE std::int64_t all_ones(IntRange a) {
  auto ones = static_cast<std::uint32_t>(greatest(a.hi, -1 - a.lo));
  ones |= ones >> 1;
  ones |= ones >> 2;
  ones |= ones >> 4;
  ones |= ones >> 8;
  return ones | ones >> 16;
}

FOVEA_DEVICE IntRange operator~(IntRange a) { return {-1 - a.hi, -1 - a.lo}; }

/// x & (2^k - 1) is x mod 2^k, for negative x as well.
FOVEA_DEVICE bool is_low_mask(IntRange a) {
  return a.is_point() && a.lo >= 0 && a.lo < kGreatestInt && (a.lo & (a.lo + 1)) == 0;
}
/// x & -2^k rounds down to a multiple of 2^k, which is monotone.
FOVEA_DEVICE bool is_high_mask(IntRange a) { return a.lo < 0 && is_low_mask(~a); }

FOVEA_DEVICE IntRange operator&(IntRange a, IntRange b) {
  if (a.is_point() && b.is_point()) return {a.lo & b.lo, a.lo & b.lo};
  if (is_low_mask(b)) return mod_positive(a, {b.lo + 1, b.lo + 1});
  if (is_low_mask(a)) return mod_positive(b, {a.lo + 1, a.lo + 1});
  if (is_high_mask(b)) return {a.lo & b.lo, a.hi & b.lo};
  if (is_high_mask(a)) return {b.lo & a.lo, b.hi & a.lo};
  // A negative operand can keep all bits of the other one; a non-negative one bounds the result.
  const bool a_bounds = a.lo >= 0;
  const bool b_bounds = b.lo >= 0;
  const std::int64_t lower = a_bounds || b_bounds ? 0 : -1 - all_ones(hull(a, b));
  if (a_bounds == b_bounds) return {lower, a_bounds ? least(a.hi, b.hi) : greatest(a.hi, b.hi)};
  return {lower, a_bounds ? a.hi : b.hi};
}
FOVEA_DEVICE IntRange operator|(IntRange a, IntRange b) { return ~(~a & ~b); }
FOVEA_DEVICE IntRange operator^(IntRange a, IntRange b) {
  if (a.is_point() && b.is_point()) return {a.lo ^ b.lo, a.lo ^ b.lo};
  const std::int64_t ones = all_ones(hull(a, b));
  return {a.lo >= 0 && b.lo >= 0 ? 0 : -1 - ones, ones};
}

/// Amounts count modulo 32; a range of them that crosses no multiple of 32 stays a range.
FOVEA_DEVICE IntRange shift_amounts(IntRange b) { return mod_positive(b, {32, 32}); }
FOVEA_DEVICE IntRange operator<<(IntRange a, IntRange b) {
  return wrapped(corners(a, shift_amounts(b), [](std::int64_t x, std::int64_t s) {
    return x * (static_cast<std::int64_t>(1) << s);
  }));
}
FOVEA_DEVICE IntRange operator>>(IntRange a, IntRange b) {
  return corners(a, shift_amounts(b), [](std::int64_t x, std::int64_t s) { return x >> s; });
}

// ---- sums that share positions -----------------------------------------------------------------

/// constant + factor * value + ..., not wrapped: q_idx + 3 > q_idx loses nothing this way.
FOVEA_DEVICE IntRange affine(std::int64_t constant) { return {constant, constant}; }
template <class... Rest>
FOVEA_DEVICE IntRange affine(std::int64_t constant, std::int64_t factor, IntRange value,
                             Rest... rest) {
  const IntRange sum = affine(constant, rest...);
  return {sum.lo + factor * (factor > 0 ? value.lo : value.hi),
          sum.hi + factor * (factor > 0 ? value.hi : value.lo)};
}

/// May two ints be compared by their difference? One that can be anything may have wrapped.
FOVEA_DEVICE bool have_not_wrapped(IntRange a, IntRange b) { return !is_any(a) && !is_any(b); }

// ---- floats ------------------------------------------------------------------------------------

FOVEA_DEVICE bool is_nan(double a) { return a != a; }
FOVEA_DEVICE double or_zero(double a) { return is_nan(a) ? 0 : a; }
FOVEA_DEVICE double abs(double a) { return a < 0 ? -a : a; }
/// Beyond 2^52 every double is whole; below, the way through an int is exact.
FOVEA_DEVICE double floor(double a) {
  if (!(abs(a) < 0x1p+52)) return a;
  const auto whole = static_cast<double>(static_cast<std::int64_t>(a));
  return whole > a ? whole - 1 : whole;
}

/// A double as fp32 or fp64 evaluation may see it. Rounding is monotone: rounded ends bound what lies between them.
FOVEA_DEVICE FloatRange rounded(double lo, double hi, bool may_be_nan) {
  return {least(lo, static_cast<double>(static_cast<float>(lo))),
          greatest(hi, static_cast<double>(static_cast<float>(hi))), may_be_nan};
}

FOVEA_DEVICE bool has_zero(FloatRange a) { return a.lo <= 0 && 0 <= a.hi; }
FOVEA_DEVICE bool is_unbounded(FloatRange a) { return a.lo == -infinity() || a.hi == infinity(); }

template <class Corner>
FOVEA_DEVICE FloatRange corners(FloatRange a, FloatRange b, bool may_be_nan, Corner f) {
  const double ll = or_zero(f(a.lo, b.lo)), lh = or_zero(f(a.lo, b.hi));
  const double hl = or_zero(f(a.hi, b.lo)), hh = or_zero(f(a.hi, b.hi));
  return rounded(least(least(ll, lh), least(hl, hh)), greatest(greatest(ll, lh), greatest(hl, hh)),
                 may_be_nan || a.may_be_nan || b.may_be_nan);
}

FOVEA_DEVICE FloatRange operator-(FloatRange a) { return {-a.hi, -a.lo, a.may_be_nan}; }

FOVEA_DEVICE FloatRange operator+(FloatRange a, FloatRange b) {
  const double lo = a.lo + b.lo;
  const double hi = a.hi + b.hi;
  const bool opposite_infinities =
      (a.hi == infinity() && b.lo == -infinity()) || (a.lo == -infinity() && b.hi == infinity());
  return rounded(is_nan(lo) ? -infinity() : lo, is_nan(hi) ? infinity() : hi,
                 a.may_be_nan || b.may_be_nan || opposite_infinities);
}
FOVEA_DEVICE FloatRange operator-(FloatRange a, FloatRange b) { return a + -b; }

FOVEA_DEVICE FloatRange operator*(FloatRange a, FloatRange b) {
  const bool zero_by_infinity =
      (has_zero(a) && is_unbounded(b)) || (has_zero(b) && is_unbounded(a));
  return corners(a, b, zero_by_infinity, [](double x, double y) { return x * y; });
}

FOVEA_DEVICE FloatRange div(FloatRange a, FloatRange b) {
  if (has_zero(b)) return any_float();
  return corners(a, b, is_unbounded(a) && is_unbounded(b),
                 [](double x, double y) { return x / y; });
}

FOVEA_DEVICE FloatRange floor(FloatRange a) { return {floor(a.lo), floor(a.hi), a.may_be_nan}; }
FOVEA_DEVICE FloatRange ceil(FloatRange a) { return {-floor(-a.lo), -floor(-a.hi), a.may_be_nan}; }
FOVEA_DEVICE double trunc(double a) { return a < 0 ? -floor(-a) : floor(a); }
FOVEA_DEVICE FloatRange trunc(FloatRange a) { return {trunc(a.lo), trunc(a.hi), a.may_be_nan}; }
/// Halves to even.
FOVEA_DEVICE double round(double a) {
  const double above = floor(a + 0.5);
  const bool is_odd_half = above - a == 0.5 && above != 2 * floor(0.5 * above);
  return is_odd_half ? above - 1 : above;
}
FOVEA_DEVICE FloatRange round(FloatRange a) { return {round(a.lo), round(a.hi), a.may_be_nan}; }
FOVEA_DEVICE FloatRange floor_div(FloatRange a, FloatRange b) { return floor(div(a, b)); }

/// By the product, or the exact remainder.
FOVEA_DEVICE FloatRange mod(FloatRange a, FloatRange b) {
  const double zero = 0;
  const FloatRange remainder(least(b.lo, zero), greatest(b.hi, zero),
                             is_unbounded(a) || is_unbounded(b));
  return hull(a - b * floor_div(a, b), remainder);
}

/// No greater than the dividend, whose sign it has, and less than the divisor.
FOVEA_DEVICE FloatRange fmod(FloatRange a, FloatRange b) {
  const double zero = 0;
  const double most = greatest(-b.lo, b.hi);
  return {greatest(least(a.lo, zero), -most), least(greatest(a.hi, zero), most),
          a.may_be_nan || b.may_be_nan || is_unbounded(a) || has_zero(b)};
}

FOVEA_DEVICE FloatRange abs(FloatRange a) {
  const double zero = 0;
  return {greatest(greatest(a.lo, -a.hi), zero), greatest(-a.lo, a.hi), a.may_be_nan};
}
FOVEA_DEVICE FloatRange min(FloatRange a, FloatRange b) {
  const bool may_be_nan = a.may_be_nan || b.may_be_nan;
  return {least(a.lo, b.lo), may_be_nan ? greatest(a.hi, b.hi) : least(a.hi, b.hi), may_be_nan};
}
FOVEA_DEVICE FloatRange max(FloatRange a, FloatRange b) { return -min(-a, -b); }

/// What functions of fp32 may differ by, twice.
FOVEA_DEVICE FloatRange widened(double lo, double hi, bool may_be_nan, double absolute = 1e-37) {
  constexpr double kRelative = 1e-4;
  const double below = abs(lo) < infinity() ? abs(lo) * kRelative + absolute : 0;
  const double above = abs(hi) < infinity() ? abs(hi) * kRelative + absolute : 0;
  return rounded(lo - below, hi + above, may_be_nan);
}

template <class Function>
FOVEA_DEVICE FloatRange increasing(FloatRange a, Function f) {
  return widened(f(static_cast<float>(a.lo)), f(static_cast<float>(a.hi)), a.may_be_nan);
}
FOVEA_DEVICE FloatRange exp(FloatRange a) {
  return increasing(a, [](float x) { return exp(x); });
}
FOVEA_DEVICE FloatRange exp2(FloatRange a) {
  return increasing(a, [](float x) { return exp2(x); });
}
FOVEA_DEVICE FloatRange tanh(FloatRange a) {
  return increasing(a, [](float x) { return tanh(x); });
}
FOVEA_DEVICE FloatRange sigmoid(FloatRange a) {
  return increasing(a, [](float x) { return sigmoid(x); });
}

FOVEA_DEVICE FloatRange erf(FloatRange a) {
  return increasing(a, [](float x) { return erf(x); });
}
FOVEA_DEVICE FloatRange expm1(FloatRange a) {
  return increasing(a, [](float x) { return expm1(x); });
}
FOVEA_DEVICE FloatRange log1p(FloatRange a) {
  const double lo = a.lo <= -1 ? -infinity() : log1p(static_cast<float>(a.lo));
  const double hi = a.hi <= -1 ? -infinity() : log1p(static_cast<float>(a.hi));
  return widened(lo, hi, a.may_be_nan || a.lo < -1);
}

FOVEA_DEVICE FloatRange sin(FloatRange a) {
  return widened(-1, 1, a.may_be_nan || is_unbounded(a));
}
FOVEA_DEVICE FloatRange cos(FloatRange a) { return sin(a); }
FOVEA_DEVICE FloatRange tan(FloatRange) { return any_float(); }

template <class Function>
FOVEA_DEVICE FloatRange logarithm(FloatRange a, Function f) {
  const double lo = a.lo <= 0 ? -infinity() : f(static_cast<float>(a.lo));
  const double hi = a.hi <= 0 ? -infinity() : f(static_cast<float>(a.hi));
  return widened(lo, hi, a.may_be_nan || a.lo < 0, 1e-6);
}
FOVEA_DEVICE FloatRange log(FloatRange a) {
  return logarithm(a, [](float x) { return log(x); });
}
FOVEA_DEVICE FloatRange log2(FloatRange a) {
  return logarithm(a, [](float x) { return log2(x); });
}

FOVEA_DEVICE FloatRange sqrt(FloatRange a) {
  const double zero = 0;
  return widened(sqrt(static_cast<float>(greatest(a.lo, zero))),
                 sqrt(static_cast<float>(greatest(a.hi, zero))), a.may_be_nan || a.lo < 0);
}
FOVEA_DEVICE FloatRange rsqrt(FloatRange a) {
  if (a.lo <= 0) return any_float();  // -0 gives -inf
  return widened(rsqrt(static_cast<float>(a.hi)), rsqrt(static_cast<float>(a.lo)), a.may_be_nan);
}

FOVEA_DEVICE FloatRange pow(FloatRange a, FloatRange b) {
  // pow(NaN, 0) is 1, and a base that is not positive has corners of its own.
  if (a.may_be_nan || b.may_be_nan || a.lo <= 0) return any_float();
  if (is_unbounded(a) || is_unbounded(b)) return any_float();
  const FloatRange ends = corners(a, b, false, [](double x, double y) {
    return static_cast<double>(pow(static_cast<float>(x), static_cast<float>(y)));
  });
  return widened(ends.lo, ends.hi, false);
}

// ---- conversions -------------------------------------------------------------------------------

FOVEA_DEVICE IntRange to_int(Truth a) { return {a.can_be_false ? 0 : 1, a.can_be_true ? 1 : 0}; }
FOVEA_DEVICE std::int64_t saturated(double a) {
  if (a <= kLeastInt) return kLeastInt;
  return a >= kGreatestInt ? kGreatestInt : static_cast<std::int64_t>(a);
}
FOVEA_DEVICE IntRange to_int(FloatRange a) {
  const IntRange result(saturated(a.lo), saturated(a.hi));
  return a.may_be_nan ? hull(result, IntRange(0)) : result;
}
FOVEA_DEVICE FloatRange to_float(IntRange a) {
  return rounded(static_cast<double>(a.lo), static_cast<double>(a.hi), false);
}
FOVEA_DEVICE FloatRange to_float(Truth a) { return to_float(to_int(a)); }

}  // namespace fovea::cuda::program
