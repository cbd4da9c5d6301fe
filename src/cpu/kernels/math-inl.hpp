// Vector math in fp32, compiled once per target: what softmax and programs need. Read
// program-inl.hpp next.
//
// Errors are in units in the last place (ulp) against the exact value, measured by
// tests/unit/cpu/math_test.cpp over the whole range. Infinities, NaN, signed zeros and denormals
// follow IEEE 754 (with denormals on, as they are by default). The polynomials are minimax fits of
// the relative error; the intervals stand beside them.

#if defined(FOVEA_CPU_MATH_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_MATH_INL_
#undef FOVEA_CPU_MATH_INL_
#else
#define FOVEA_CPU_MATH_INL_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>
#include <math.h>

#include <cstddef>
#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the sum.
inline constexpr float kRoundingShift = 12582912.0F;

/// Of sines and cosines that Highway computes.
inline constexpr float kLargestAngle = 39000.0F;

/// 2^n as a float, for ints -126 <= n <= 127.
template <class D, class DI = hn::RebindToSigned<D>>
HWY_INLINE hn::Vec<D> power_of_two(D d, hn::Vec<DI> n) {
  const DI di;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
}

/// x * 2^n for |n| <= 252: in two steps, so that results may be denormal, zero or infinite with one
/// rounding.
template <class D, class DI = hn::RebindToSigned<D>>
HWY_INLINE hn::Vec<D> scale_by_power_of_two(D d, hn::Vec<D> x, hn::Vec<DI> n) {
  const auto half = hn::ShiftRight<1>(n);
  const auto scaled = hn::Mul(x, power_of_two(d, half));
  return hn::Mul(scaled, power_of_two(d, hn::Sub(n, half)));
}

/// x limited to [lo, hi]; NaN stays NaN on every target.
template <class D>
HWY_INLINE hn::Vec<D> clamp_keeping_nan(D d, hn::Vec<D> x, float lo, float hi) {
  const auto low = hn::Set(d, lo);
  const auto high = hn::Set(d, hi);
  const auto raised = hn::IfThenElse(hn::Lt(x, low), low, x);
  return hn::IfThenElse(hn::Gt(raised, high), high, raised);
}

/// Powers of two below this are 0 to exp2_nonpositive. They are lost in any sum with a term of 1,
/// and their products with values would be denormal, which Intel's processors compute a hundred
/// times slower: with ALiBi, or a bias that grows with the position, that is most of a row.
inline constexpr float kZeroPower = -100.0F;

/// x * factor = n + fraction with integer n and |fraction| <= 1/2, and 2^n scaled by 2^-27 (0 for
/// n = kZeroPower), for products in [kZeroPower, 127]. 2^n is used as a factor rather than added to
/// the exponent's bits: a NaN in the other factor stays NaN whatever 2^n is.
template <class D>
struct PowerSplit {
  hn::Vec<D> fraction;
  hn::Vec<D> power;
};

template <class D>
HWY_INLINE PowerSplit<D> split_power(D d, hn::Vec<D> x, hn::Vec<D> factor) {
  const hn::RebindToSigned<D> di;
  // The bias of the exponent rides on the shift: n + 100 is in the low bits, where ShiftLeft<23>
  // makes it 2^(n - 27).
  const auto shift = hn::Set(d, kRoundingShift - kZeroPower);
  const auto shifted = hn::MulAdd(x, factor, shift);
  const auto fraction = hn::MulSub(x, factor, hn::Sub(shifted, shift));
  return {fraction, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(di, shifted)))};
}

/// x, but at least `lo`; NaN stays NaN on every target.
template <class D>
HWY_INLINE hn::Vec<D> raise_keeping_nan([[maybe_unused]] D d, hn::Vec<D> x, hn::Vec<D> lo) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  return hn::Max(lo, x);  // maxps gives its second operand where one is NaN
#else
  return hn::IfThenElse(hn::Lt(x, lo), lo, x);
#endif
}

/// 2^(x * factor) for products <= 0 (and up to 127): 2 ulp, exactly 1 at 0. Below -99.5 and at -inf
/// exactly 0; NaN gives NaN. lowest is kZeroPower / factor and finite. Degree 5 on [-1/2, 1/2],
/// relative error of the polynomial 9.2e-8; its coefficients are scaled by 2^27.
/// Note: at n = kZeroPower the bits of split_power's factor are those of zero, so limiting x there
/// is all that underflow takes.
template <class D>
HWY_INLINE hn::Vec<D> exp2_nonpositive(D d, hn::Vec<D> x, hn::Vec<D> factor, hn::Vec<D> lowest) {
  const auto split = split_power(d, raise_keeping_nan(d, x, lowest), factor);
  const auto f = split.fraction;
  auto p = hn::MulAdd(f, hn::Set(d, 0x1.5bba14p+17F), hn::Set(d, 0x1.3cea88p+20F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6b752p+22F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebf9bcp+24F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e42ap+26F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1p+27F));
  return hn::Mul(p, split.power);
}

/// 2^x: 2 ulp, all x; denormal results included. Degree 6 on [-1/2, 1/2].
template <class D>
HWY_INLINE hn::Vec<D> exp2(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto shift = hn::Set(d, kRoundingShift);
  const auto limited = clamp_keeping_nan(d, x, -152.0F, 129.0F);  // 0 and infinity once rounded
  const auto shifted = hn::Add(limited, shift);
  const auto f = hn::Sub(limited, hn::Sub(shifted, shift));
  auto p = hn::MulAdd(f, hn::Set(d, 0x1.41fbbcp-13F), hn::Set(d, 0x1.5f3e52p-10F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2d4cp-7F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6aee8p-5F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbdcp-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e430p-1F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
  const auto n = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, shift));
  return scale_by_power_of_two(d, p, n);
}

/// x = n ln 2 + r with |r| <= ln(2)/2, and e^r - 1, for |x| <= 110: the common part of exp and
/// tanh.
template <class D>
struct ExpSplit {
  hn::Vec<hn::RebindToSigned<D>> n;
  hn::Vec<D> expm1_r;
};

template <class D>
HWY_INLINE ExpSplit<D> split_exp(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto shift = hn::Set(d, kRoundingShift);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 0x1.715476p+0F), shift);  // log2(e)
  const auto n = hn::Sub(shifted, shift);
  // ln 2 in two parts: the first has 9 bits, so that n times it is exact.
  auto r = hn::NegMulAdd(n, hn::Set(d, 0x1.63p-1F), x);
  r = hn::NegMulAdd(n, hn::Set(d, -0x1.bd0106p-13F), r);
  auto q = hn::MulAdd(r, hn::Set(d, 0x1.a032c0p-13F), hn::Set(d, 0x1.6d7208p-10F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.11118ap-7F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5554b2p-5F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555554p-3F));
  q = hn::MulAdd(q, r, hn::Set(d, 0.5F));
  const auto expm1_r = hn::MulAdd(hn::Mul(r, r), q, r);
  return {hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, shift)), expm1_r};
}

/// e^x: 2 ulp, all x; denormal results included.
template <class D>
HWY_INLINE hn::Vec<D> exp(D d, hn::Vec<D> x) {
  const auto split =
      split_exp(d, clamp_keeping_nan(d, x, -105.0F, 89.0F));  // 0 and infinity once rounded
  return scale_by_power_of_two(d, hn::Add(split.expm1_r, hn::Set(d, 1.0F)), split.n);
}

/// tanh x: 3 ulp, all x, relative to the result also near 0. tanh = t / (t + 2) with t = e^(2|x|) -
/// 1, and t is computed without cancellation from e^r - 1.
template <class D>
HWY_INLINE hn::Vec<D> tanh(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0F);
  const auto magnitude =
      clamp_keeping_nan(d, hn::Abs(x), 0.0F, 10.0F);  // 1 once rounded, from 9.02 on
  const auto split = split_exp(d, hn::Add(magnitude, magnitude));
  const auto power = power_of_two(d, split.n);
  const auto t = hn::MulAdd(power, split.expm1_r, hn::Sub(power, one));
  return hn::CopySign(hn::Div(t, hn::Add(t, hn::Set(d, 2.0F))), x);
}

/// 1 / (1 + e^-x): 4 ulp, all x; does not flush where e^-x overflows.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0F);
  const auto e = exp(d, hn::Neg(hn::Abs(x)));
  const auto numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one);
  return hn::Div(numerator, hn::Add(one, e));
}

/// x = 2^e m with m in [sqrt(1/2), sqrt(2)), and log m = f + tail with f = m - 1 (exact), for
/// finite x > 0.
template <class D>
struct LogSplit {
  hn::Vec<D> exponent;
  hn::Vec<D> f;
  hn::Vec<D> tail;
};

template <class D>
HWY_INLINE LogSplit<D> split_log(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto is_denormal = hn::Lt(x, hn::Set(d, std::numeric_limits<float>::min()));
  const auto normal = hn::IfThenElse(is_denormal, hn::Mul(x, hn::Set(d, 0x1p25F)), x);
  const auto sqrt_half = hn::Set(di, 0x3f3504f3);
  const auto bits = hn::Sub(hn::BitCast(di, normal), sqrt_half);
  const auto m_bits = hn::Add(hn::And(bits, hn::Set(di, 0x7fffff)), sqrt_half);
  const auto f = hn::Sub(hn::BitCast(d, m_bits), hn::Set(d, 1.0F));
  auto p = hn::MulAdd(f, hn::Set(d, 0x1.1457a8p-4F), hn::Set(d, -0x1.de3c16p-4F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.e6f06ap-4F));
  p = hn::MulAdd(p, f, hn::Set(d, -0x1.fc2208p-4F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.233768p-3F));
  p = hn::MulAdd(p, f, hn::Set(d, -0x1.555c4ep-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.99a4b6p-3F));
  p = hn::MulAdd(p, f, hn::Set(d, -0x1.000006p-2F));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.555548p-2F));
  const auto f2 = hn::Mul(f, f);
  const auto tail = hn::NegMulAdd(hn::Set(d, 0.5F), f2, hn::Mul(hn::Mul(f2, f), p));
  const auto shift = hn::IfThenElseZero(is_denormal, hn::Set(d, 25.0F));
  return {hn::Sub(hn::ConvertTo(d, hn::ShiftRight<23>(bits)), shift), f, tail};
}

/// -inf at 0, NaN below, +inf and NaN as they are, else `result`.
template <class D>
HWY_INLINE hn::Vec<D> with_special_logs(D d, hn::Vec<D> x, hn::Vec<D> result) {
  const auto infinity = hn::Inf(d);
  const auto zero = hn::Zero(d);
  const auto finite_or_inf = hn::IfThenElse(hn::Lt(x, infinity), result, x);
  const auto negative_or_not = hn::IfThenElse(hn::Lt(x, zero), hn::NaN(d), finite_or_inf);
  return hn::IfThenElse(hn::Eq(x, zero), hn::Neg(infinity), negative_or_not);
}

/// log x: 2 ulp, all x, relative to the result also near 1.
template <class D>
HWY_INLINE hn::Vec<D> log(D d, hn::Vec<D> x) {
  const auto split = split_log(d, x);
  // ln 2 in two parts: the first has 9 bits, so that the exponent times it is exact; small terms
  // are added first.
  const auto tail = hn::MulAdd(split.exponent, hn::Set(d, -0x1.bd0106p-13F), split.tail);
  const auto sum = hn::Add(split.f, tail);
  return with_special_logs(d, x, hn::MulAdd(split.exponent, hn::Set(d, 0x1.63p-1F), sum));
}

/// log2 x: 3 ulp, all x; exact at powers of two.
template <class D>
HWY_INLINE hn::Vec<D> log2(D d, hn::Vec<D> x) {
  const auto split = split_log(d, x);
  const auto log_m = hn::Add(split.f, split.tail);
  const auto result = hn::MulAdd(log_m, hn::Set(d, 0x1.715476p+0F), split.exponent);  // log2(e)
  return with_special_logs(d, x, result);
}

/// e^x - 1: 3 ulp, all x, relative to the result also near 0. The powers are halved, so that 2^128 is none of them.
template <class D>
HWY_INLINE hn::Vec<D> expm1(D d, hn::Vec<D> x) {
  const auto split =
      split_exp(d, clamp_keeping_nan(d, x, -30.0F, 89.0F));  // -1 and infinity once rounded
  const hn::RebindToSigned<D> di;
  const auto half_power = power_of_two(d, hn::Sub(split.n, hn::Set(di, 1)));
  const auto half = hn::MulAdd(half_power, split.expm1_r, hn::Sub(half_power, hn::Set(d, 0.5F)));
  return hn::CopySign(hn::Add(half, half), x);
}

/// log(1 + x): 4 ulp, all x, relative to the result also near 0. The rounding of 1 + x is made up for by a factor that
/// has it too (Kahan, as in Higham 2002, problem 1.5).
template <class D>
HWY_INLINE hn::Vec<D> log1p(D d, hn::Vec<D> x) {
  const auto sum = hn::Add(x, hn::Set(d, 1.0F));
  const auto rounded = hn::Sub(sum, hn::Set(d, 1.0F));
  const auto result = hn::Mul(log(d, sum), hn::Div(x, rounded));
  const auto is_itself = hn::Or(hn::Eq(rounded, hn::Zero(d)), hn::Eq(x, hn::Inf(d)));
  return hn::IfThenElse(is_itself, x, result);
}

/// erf x: 3 ulp, all x, relative to the result also near 0. Below 0.9275 x + x P(x^2), above 1 - e^(t Q(t)); minimax
/// fits of the relative error, 1.7e-8 and 7e-10.
template <class D>
HWY_INLINE hn::Vec<D> erf(D d, hn::Vec<D> x) {
  const auto t = clamp_keeping_nan(d, hn::Abs(x), 0.0F, 4.0F);  // 1 once rounded, from 3.92 on
  auto q = hn::MulAdd(t, hn::Set(d, -0x1.82805ep-17F), hn::Set(d, 0x1.55809cp-12F));
  q = hn::MulAdd(q, t, hn::Set(d, -0x1.def5a8p-9F));
  q = hn::MulAdd(q, t, hn::Set(d, 0x1.85b950p-6F));
  q = hn::MulAdd(q, t, hn::Set(d, -0x1.b343a8p-4F));
  q = hn::MulAdd(q, t, hn::Set(d, -0x1.45304p-1F));
  q = hn::MulAdd(q, t, hn::Set(d, -0x1.20ef64p+0F));
  const auto large = hn::Sub(hn::Set(d, 1.0F), exp(d, hn::Mul(q, t)));
  const auto s = hn::Mul(t, t);
  auto p = hn::MulAdd(s, hn::Set(d, -0x1.38bf1p-11F), hn::Set(d, 0x1.46e7dp-8F));
  p = hn::MulAdd(p, s, hn::Set(d, -0x1.b67d3p-6F));
  p = hn::MulAdd(p, s, hn::Set(d, 0x1.ce1974p-4F));
  p = hn::MulAdd(p, s, hn::Set(d, -0x1.8126ep-2F));
  p = hn::MulAdd(p, s, hn::Set(d, 0x1.06eba6p-3F));
  const auto small = hn::MulAdd(t, p, t);
  return hn::CopySign(hn::IfThenElse(hn::Gt(t, hn::Set(d, 0.9275F)), large, small), x);
}

/// Lanes where |x| is beyond the range that Highway reduces exactly take the C library's value, one by one: which ones
/// does not depend on their neighbours, and neither do their bits.
template <class D, class Function>
HWY_INLINE hn::Vec<D> with_large_angles(D d, hn::Vec<D> x, hn::Vec<D> result, Function function) {
  const auto is_near = hn::Le(hn::Abs(x), hn::Set(d, kLargestAngle));
  if (HWY_LIKELY(hn::AllTrue(d, is_near))) return result;
  HWY_ALIGN float each[hn::MaxLanes(d)];
  hn::Store(x, d, each);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) each[i] = function(each[i]);
  return hn::IfThenElse(is_near, result, hn::Load(d, each));
}

/// sin x: 3 ulp, all x.
template <class D>
HWY_INLINE hn::Vec<D> sin(D d, hn::Vec<D> x) {
  return with_large_angles(d, x, hn::Sin(d, x), [](float a) { return sinf(a); });
}

/// cos x: 3 ulp, all x.
template <class D>
HWY_INLINE hn::Vec<D> cos(D d, hn::Vec<D> x) {
  return with_large_angles(d, x, hn::Cos(d, x), [](float a) { return cosf(a); });
}

/// tan x: 6 ulp, all x.
template <class D>
HWY_INLINE hn::Vec<D> tan(D d, hn::Vec<D> x) {
  return with_large_angles(d, x, hn::Div(hn::Sin(d, x), hn::Cos(d, x)),
                           [](float a) { return tanf(a); });
}

/// 1 / sqrt(x): 2 ulp; +inf at +0, -inf at -0, NaN below.
template <class D>
HWY_INLINE hn::Vec<D> rsqrt(D d, hn::Vec<D> x) {
  return hn::Div(hn::Set(d, 1.0F), hn::Sqrt(x));
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_MATH_INL_
