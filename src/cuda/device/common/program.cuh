// What printed score and mask programs call (expr/print_cuda.hpp): ints that wrap, floats as the contract wants them,
// loads from captured tensors. Read range.cuh for the same operations on ranges.
//
// Everything here means what src/expr/node.hpp says and src/reference/evaluate.cpp does in fp64. Of the floats,
// relative errors:
//   + - * abs floor min max / % sqrt   rounded once (a product and a sum may become one fma, which rounds less)
//   approx_div                         2^-22, printed where no comparison or rounding to whole numbers can see it
//   exp log log2 sigmoid               2^-20, 2^-19, 2^-19, 2^-20
//   exp2 tanh rsqrt                    2^-21, 2^-21, 2^-23; of tanh also near 0, so that softcap(s) is s for small s
//   ceil trunc round fmod              exact
//   sin cos                            2^-22 where neither is near 0, 2^-21 there; tan 2^-20
//   erf log1p expm1                    2^-21, 2^-19, 2^-19
//   pow                                2^-19 |b log2 a|
// Note: tanh.approx has a relative error of 2^-11. A softcap of 50 then moves a score of 30 by 0.015, and its
// probability by 1.5 %: eight times what rounding a probability to bf16 does. So tanh is computed in full, in every
// precision.
#pragma once

#include "common/position.cuh"
#include "ptx/base.cuh"
#include "ptx/exp_log.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/captures.h"

namespace fovea::cuda {

/// The number of a place where a program reads captured data, as a type.
template <int idx>
struct SiteIdx {};

/// How neighbouring pairs of a tile come to load one element: along a row of keys, a column of queries, or a diagonal.
enum class PairOrder : std::uint8_t { rows, keys, diagonals };

}  // namespace fovea::cuda

namespace fovea::cuda::program {

inline constexpr std::int32_t kLeastInt = -2147483647 - 1;
inline constexpr std::int32_t kGreatestInt = 2147483647;

FOVEA_DEVICE float infinity() { return ptx::bit_cast<float>(0x7f800000U); }
FOVEA_DEVICE float nan() { return ptx::bit_cast<float>(0x7fc00000U); }

// ---- ints: 32 bits that wrap -------------------------------------------------------------------

struct Int {
  std::int32_t value;
  Int() = default;
  FOVEA_DEVICE_MEMBER Int(std::int32_t from) : value(from) {}  // NOLINT: literals in formulas
};

FOVEA_DEVICE std::uint32_t bits(Int a) { return static_cast<std::uint32_t>(a.value); }
FOVEA_DEVICE Int int_of_bits(std::uint32_t bits) { return static_cast<std::int32_t>(bits); }

FOVEA_DEVICE Int operator+(Int a, Int b) { return int_of_bits(bits(a) + bits(b)); }
FOVEA_DEVICE Int operator-(Int a, Int b) { return int_of_bits(bits(a) - bits(b)); }
FOVEA_DEVICE Int operator*(Int a, Int b) { return int_of_bits(bits(a) * bits(b)); }
FOVEA_DEVICE Int operator-(Int a) { return int_of_bits(0U - bits(a)); }
FOVEA_DEVICE Int operator&(Int a, Int b) { return a.value & b.value; }
FOVEA_DEVICE Int operator|(Int a, Int b) { return a.value | b.value; }
FOVEA_DEVICE Int operator^(Int a, Int b) { return a.value ^ b.value; }
FOVEA_DEVICE Int operator~(Int a) { return ~a.value; }
/// Amounts count modulo 32; >> keeps the sign.
FOVEA_DEVICE Int operator<<(Int a, Int b) { return int_of_bits(bits(a) << (bits(b) & 31U)); }
FOVEA_DEVICE Int operator>>(Int a, Int b) { return a.value >> (bits(b) & 31U); }

FOVEA_DEVICE bool operator<(Int a, Int b) { return a.value < b.value; }
FOVEA_DEVICE bool operator<=(Int a, Int b) { return a.value <= b.value; }
FOVEA_DEVICE bool operator>(Int a, Int b) { return a.value > b.value; }
FOVEA_DEVICE bool operator>=(Int a, Int b) { return a.value >= b.value; }
FOVEA_DEVICE bool operator==(Int a, Int b) { return a.value == b.value; }
FOVEA_DEVICE bool operator!=(Int a, Int b) { return a.value != b.value; }

FOVEA_DEVICE Int min(Int a, Int b) { return a < b ? a : b; }
FOVEA_DEVICE Int max(Int a, Int b) { return a < b ? b : a; }
FOVEA_DEVICE Int abs(Int a) { return a < 0 ? -a : a; }

/// A divisor that the hardware may divide by: zero, and -1 by which the least int has no quotient, are left to the
/// callers. No branch, so that what depends on the divisor alone leaves the loop.
FOVEA_DEVICE std::int32_t safe_divisor(Int b) { return b == 0 || b == -1 ? 1 : b.value; }

/// Rounds to -inf; by zero gives 0, and the least int by -1 wraps.
FOVEA_DEVICE Int floor_div(Int a, Int b) {
  const std::int32_t divisor = safe_divisor(b);
  const std::int32_t quotient = a.value / divisor;
  const std::int32_t remainder = a.value - quotient * divisor;
  const bool is_above = remainder != 0 && (remainder ^ divisor) < 0;
  const Int rounded = quotient - (is_above ? 1 : 0);
  return b == 0 ? Int(0) : b == -1 ? -a : rounded;
}

/// Has the sign of b; by zero gives 0, as by 1 and -1.
FOVEA_DEVICE Int mod(Int a, Int b) {
  const std::int32_t divisor = safe_divisor(b);
  const std::int32_t remainder = a.value % divisor;
  return remainder != 0 && (remainder ^ divisor) < 0 ? remainder + divisor : remainder;
}

// ---- conversions -------------------------------------------------------------------------------

FOVEA_DEVICE Int to_int(bool a) { return a ? 1 : 0; }

/// Towards zero, saturated; NaN gives 0.
FOVEA_DEVICE Int to_int(float a) {
  if (!(a > -0x1p+31F)) return a != a ? 0 : kLeastInt;
  return a < 0x1p+31F ? static_cast<std::int32_t>(a) : kGreatestInt;
}

FOVEA_DEVICE float to_float(Int a) { return static_cast<float>(a.value); }
FOVEA_DEVICE float to_float(bool a) { return a ? 1.0F : 0.0F; }

// ---- floats ------------------------------------------------------------------------------------

FOVEA_DEVICE bool is_nan(float a) { return a != a; }
FOVEA_DEVICE float abs(float a) { return ptx::abs(a); }
FOVEA_DEVICE float with_sign_of(float magnitude, float sign) {
  return ptx::bit_cast<float>(ptx::bit_cast<std::uint32_t>(magnitude) |
                              (ptx::bit_cast<std::uint32_t>(sign) & 0x80000000U));
}

/// A NaN on either side gives NaN.
FOVEA_DEVICE float max(float a, float b) { return ptx::max_nan(a, b); }
FOVEA_DEVICE float min(float a, float b) { return -ptx::max_nan(-a, -b); }

/// Beyond 2^23 every float is whole; below, the way through an int is exact.
FOVEA_DEVICE float floor(float a) {
  if (!(abs(a) < 0x1p+23F)) return a;
  const float whole = static_cast<float>(static_cast<std::int32_t>(a));
  return with_sign_of(abs(whole > a ? whole - 1.0F : whole), a);
}

FOVEA_DEVICE float ceil(float a) { return -floor(-a); }
FOVEA_DEVICE float trunc(float a) { return with_sign_of(floor(abs(a)), a); }
/// Halves to even, by a sum that has no bits for them.
FOVEA_DEVICE float round(float a) {
  const float magnitude = abs(a);
  if (!(magnitude < 0x1p+23F)) return a;
  return with_sign_of(ptx::add_rn(ptx::add_rn(magnitude, 0x1p+23F), -0x1p+23F), a);
}

FOVEA_DEVICE float floor_div(float a, float b) { return floor(ptx::div_rn(a, b)); }

/// The exact remainder, with the sign of a: |a| less multiples of |b| 2^k, k falling. A step for each bit of the
/// quotient.
FOVEA_DEVICE float fmod(float a, float b) {
  const float divisor = abs(b);
  float rest = abs(a);
  if (!(rest < infinity()) || !(divisor > 0)) return nan();
  float multiple = divisor;
  while (multiple <= 0.5F * rest) multiple += multiple;
  for (; divisor <= multiple && multiple < infinity(); multiple *= 0.5F) {
    if (rest >= multiple) rest -= multiple;
  }
  return with_sign_of(rest, a);
}

/// The same with the sign of b.
FOVEA_DEVICE float mod(float a, float b) {
  const float remainder = fmod(a, b);
  return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

FOVEA_DEVICE float div(float a, float b) { return ptx::div_rn(a, b); }

/// a / b as a product with 1 / b, which leaves loops where b does. Scaled where 1 / b would be denormal, or b is.
FOVEA_DEVICE float approx_div(float a, float b) {
  const float magnitude = abs(b);
  const float scale = magnitude > 0x1p+125F ? 0x1p-64F : magnitude < 0x1p-125F ? 0x1p+64F : 1.0F;
  return a * ptx::rcp_approx_ftz(b * scale) * scale;
}

FOVEA_DEVICE float sqrt(float a) { return ptx::sqrt_rn(a); }
FOVEA_DEVICE float rsqrt(float a) { return ptx::div_rn(1.0F, ptx::sqrt_rn(a)); }

FOVEA_DEVICE float exp(float a) { return ptx::exp_f32(a); }
FOVEA_DEVICE float log(float a) { return ptx::log_f32(a); }

/// Denormal results included: ex2.approx.ftz alone would make them zero.
FOVEA_DEVICE float exp2(float a) {
  const bool is_tiny = a < -100.0F;
  const float power = ptx::ex2_approx_ftz(is_tiny ? a + 64.0F : a);
  return is_tiny ? power * 0x1p-64F : power;
}

/// Whole at powers of two. Near 1 by way of the natural logarithm's series, which keeps the relative error that
/// lg2.approx loses.
FOVEA_DEVICE float log2(float a) {
  if (a > 0.75F && a < 1.25F) return ptx::log_f32(a) * 0x1.715476p+0F;
  const bool is_tiny = a < 0x1p-100F;
  const float log2_a = ptx::lg2_approx_ftz(is_tiny ? a * 0x1p+64F : a);
  return is_tiny ? log2_a - 64.0F : log2_a;
}

/// x P(x^2) / Q(x^2), a minimax fit of the relative error on [0, 9], 2.1e-8; beyond 9 tanh rounds to 1. One reciprocal
/// is all it asks of the unit that softmax waits for: by e^(2x) it would be two.
FOVEA_DEVICE float tanh(float a) {
  const float x = min(max(a, -9.0F), 9.0F);
  const float x2 = x * x;
  float p = ptx::fma_rn(x2, 0x1.cac466p-27F, 0x1.59bc28p-16F);
  float q = ptx::fma_rn(x2, 0x1.a171dep-21F, 0x1.58820cp-12F);
  p = ptx::fma_rn(x2, p, 0x1.ca29a6p-9F);
  q = ptx::fma_rn(x2, q, 0x1.a7f6acp-6F);
  p = ptx::fma_rn(x2, p, 0x1.120ac6p-3F);
  q = ptx::fma_rn(x2, q, 0x1.de5aacp-2F);
  p = ptx::fma_rn(x2, p, 1.0F);
  q = ptx::fma_rn(x2, q, 1.0F);
  return x * p * ptx::rcp_approx_ftz(q);
}

/// 1 / (1 + e^-a), which is 0 where e^-a is infinite.
FOVEA_DEVICE float sigmoid(float a) { return approx_div(1.0F, 1.0F + ptx::exp_f32(-a)); }

/// Near 0 by x + x^2 P(x), a minimax fit of the relative error on [-1/2, 1/2], 3.2e-9.
FOVEA_DEVICE float expm1(float a) {
  if (!(abs(a) < 0.5F)) return ptx::exp_f32(a) - 1.0F;
  float p = ptx::fma_rn(a, 0x1.a047d2p-13F, 0x1.6ee6c4p-10F);
  p = ptx::fma_rn(p, a, 0x1.11132p-7F);
  p = ptx::fma_rn(p, a, 0x1.555298p-5F);
  p = ptx::fma_rn(p, a, 0x1.555552p-3F);
  p = ptx::fma_rn(p, a, 0x1.000002p-1F);
  return with_sign_of(abs(ptx::fma_rn(a * a, p, a)), a);
}

/// The rounding of 1 + a is made up for by a factor that has it too (Kahan).
FOVEA_DEVICE float log1p(float a) {
  const float sum = ptx::add_rn(a, 1.0F);
  const float rounded = ptx::add_rn(sum, -1.0F);
  if (rounded == 0 || a == infinity()) return a;
  return ptx::log_f32(sum) * ptx::div_rn(a, rounded);
}

/// Below 0.9275 x + x P(x^2), above 1 - e^(t Q(t)); minimax fits of the relative error, 1.7e-8 and 7e-10.
FOVEA_DEVICE float erf(float a) {
  const float t = min(abs(a), 4.0F);  // 1 once rounded, from 3.92 on
  if (t > 0.9275F) {
    float q = ptx::fma_rn(t, -0x1.82805ep-17F, 0x1.55809cp-12F);
    q = ptx::fma_rn(q, t, -0x1.def5a8p-9F);
    q = ptx::fma_rn(q, t, 0x1.85b95p-6F);
    q = ptx::fma_rn(q, t, -0x1.b343a8p-4F);
    q = ptx::fma_rn(q, t, -0x1.45304p-1F);
    q = ptx::fma_rn(q, t, -0x1.20ef64p+0F);
    return with_sign_of(1.0F - ptx::exp_f32(q * t), a);
  }
  const float s = a * a;
  float p = ptx::fma_rn(s, -0x1.38bf1p-11F, 0x1.46e7dp-8F);
  p = ptx::fma_rn(p, s, -0x1.b67d3p-6F);
  p = ptx::fma_rn(p, s, 0x1.ce1974p-4F);
  p = ptx::fma_rn(p, s, -0x1.8126ep-2F);
  p = ptx::fma_rn(p, s, 0x1.06eba6p-3F);
  return ptx::fma_rn(a, p, a);
}

/// An angle less a multiple of pi / 2, in [-pi/4, pi/4], and the multiple modulo 4.
struct Angle {
  float rest;
  std::uint32_t quadrant;
};

/// 2 / pi, bits 0 to 31 behind the point last.
FOVEA_DEVICE std::uint32_t two_over_pi(std::uint32_t word) {
  constexpr std::uint32_t kWords[] = {0x3c439041U, 0xdb629599U, 0xf534ddc0U,
                                      0xfc2757d1U, 0x4e441529U, 0xa2f9836eU};
  return kWords[word];
}

/// Of angles of 2^15 and more, by the bits of 2 / pi that their product does not lose to whole turns (Payne and Hanek
/// 1983).
FOVEA_DEVICE Angle reduced_large(float a) {
  const std::uint32_t bits = ptx::bit_cast<std::uint32_t>(a);
  const std::uint32_t mantissa = bits << 8U | 0x80000000U;
  const std::uint32_t exponent = (bits >> 23U & 0xffU) - 128U;
  const std::uint32_t first = 4U - exponent / 32U;
  // The words of the product that hold two bits of the quotient and what is behind them.
  std::uint32_t low = 0, middle = 0, high = 0, carry = 0;
  for (std::uint32_t word = 0; word <= first + 2U; ++word) {
    const std::uint64_t product =
        word < 6U ? static_cast<std::uint64_t>(two_over_pi(word)) * mantissa + carry : carry;
    low = middle;
    middle = high;
    high = static_cast<std::uint32_t>(product);
    carry = static_cast<std::uint32_t>(product >> 32U);
  }
  const std::uint32_t shift = exponent % 32U;
  if (shift != 0) {
    high = high << shift | middle >> (32U - shift);
    middle = middle << shift | low >> (32U - shift);
  }
  std::uint32_t quadrant = high >> 30U;
  const std::uint64_t fraction = (static_cast<std::uint64_t>(high) << 32U | middle) << 2U;
  quadrant += static_cast<std::uint32_t>(fraction >> 63U);  // to the nearest
  const double rest =
      static_cast<double>(static_cast<std::int64_t>(fraction)) * 0x1.921fb54442d18p-64;
  if (a < 0) return {static_cast<float>(-rest), 0U - quadrant};
  return {static_cast<float>(rest), quadrant};
}

/// Below 2^15, pi / 2 in three parts of an fma each (Cody and Waite 1980).
FOVEA_DEVICE Angle reduced(float a) {
  if (abs(a) >= 0x1p+15F) return reduced_large(a);
  const float turns = round(a * 0x1.45f306p-1F);
  float rest = ptx::fma_rn(turns, -0x1.921fb6p+0F, a);
  rest = ptx::fma_rn(turns, 0x1.777a5cp-25F, rest);
  rest = ptx::fma_rn(turns, 0x1.ee59dap-50F, rest);
  return {rest, static_cast<std::uint32_t>(static_cast<std::int32_t>(turns))};
}

/// Minimax fits of the relative error on [-pi/4, pi/4]: of the sine 3.8e-9, of the cosine 1.2e-10.
FOVEA_DEVICE float sine_of(float rest) {
  const float s = rest * rest;
  float p = ptx::fma_rn(s, -0x1.99405ep-13F, 0x1.11073p-7F);
  p = ptx::fma_rn(p, s, -0x1.555546p-3F);
  return ptx::fma_rn(rest * s, p, rest);
}
FOVEA_DEVICE float cosine_of(float rest) {
  const float s = rest * rest;
  float p = ptx::fma_rn(s, 0x1.99e866p-16F, -0x1.6c0c28p-10F);
  p = ptx::fma_rn(p, s, 0x1.55554ap-5F);
  p = ptx::fma_rn(p, s, -0.5F);
  return ptx::fma_rn(p, s, 1.0F);
}

FOVEA_DEVICE float sine_in(const Angle& angle, std::uint32_t quadrant) {
  const float value = (quadrant & 1U) != 0 ? cosine_of(angle.rest) : sine_of(angle.rest);
  return (quadrant & 2U) != 0 ? -value : value;
}

FOVEA_DEVICE float sin(float a) {
  if (!(abs(a) < infinity())) return nan();
  const Angle angle = reduced(a);
  return angle.quadrant == 0 && angle.rest == 0 ? a : sine_in(angle, angle.quadrant);
}
FOVEA_DEVICE float cos(float a) {
  if (!(abs(a) < infinity())) return nan();
  const Angle angle = reduced(a);
  return sine_in(angle, angle.quadrant + 1U);
}
FOVEA_DEVICE float tan(float a) { return ptx::div_rn(sin(a), cos(a)); }

FOVEA_DEVICE bool is_whole(float a) { return floor(a) == a; }
FOVEA_DEVICE bool is_odd(float a) { return is_whole(a) && !is_whole(0.5F * a); }

/// With the special cases of C's pow: a^0 and 1^b are 1 for NaN too, a negative base wants a whole exponent.
FOVEA_DEVICE float pow(float a, float b) {
  if (b == 0 || a == 1) return 1.0F;
  const float base = abs(a);
  if (a < 0 && base < infinity() && !is_whole(b)) return nan();
  const float power = base == 1 ? 1.0F : exp2(b * log2(base));
  return is_odd(b) ? with_sign_of(power, a) : power;
}

// ---- captured tensors and scalars --------------------------------------------------------------

struct Bool {
  std::uint8_t byte;
};
struct F16 {
  std::uint16_t bits;
};
struct Bf16 {
  std::uint16_t bits;
};

/// What an element is in a program: any non-zero byte is true, i64 saturates.
FOVEA_DEVICE bool value_of(Bool a) { return a.byte != 0; }
FOVEA_DEVICE Int value_of(std::uint8_t a) { return static_cast<std::int32_t>(a); }
FOVEA_DEVICE Int value_of(std::int8_t a) { return static_cast<std::int32_t>(a); }
FOVEA_DEVICE Int value_of(std::int32_t a) { return a; }
FOVEA_DEVICE Int value_of(std::int64_t a) {
  const std::int64_t limited = a < kLeastInt ? kLeastInt : a > kGreatestInt ? kGreatestInt : a;
  return static_cast<std::int32_t>(limited);
}
FOVEA_DEVICE float value_of(float a) { return a; }
FOVEA_DEVICE float value_of(F16 a) { return ptx::f32_of_f16_lo(a.bits); }
FOVEA_DEVICE float value_of(Bf16 a) { return ptx::f32_of_bf16_lo(a.bits); }

/// An index out of range reads the nearest element. A tensor has elements: the host refuses others.
FOVEA_DEVICE std::int64_t clamped(Int index, std::int32_t extent) {
  return min(max(index, 0), extent - 1).value;
}

/// Loads go by the read-only path, so that the compiler keeps what a loop does not change.
template <class Element>
FOVEA_DEVICE auto element_at(const CapturedTensorParam& tensor, std::int64_t offset) {
  return value_of(ptx::ld_global_nc(static_cast<const Element*>(tensor.data) + offset));
}

/// Which element that is, in row-major order.
template <std::int32_t slot, class... Index>
FOVEA_DEVICE std::int64_t element_of(const Captures& captures, Index... indices) {
  const CapturedTensorParam& tensor = captures.tensors[slot];
  [[maybe_unused]] std::int32_t dim = 0;
  std::int64_t element = 0;
  ((element = element * tensor.shape[dim] + clamped(indices, tensor.shape[dim]), ++dim), ...);
  return element;
}

/// tensor[indices...]; slot, element and rank are printed, all else is a parameter. No index, no dimension: the one
/// element of a tensor of rank 0.
template <std::int32_t slot, class Element, class... Index>
FOVEA_DEVICE auto load(const Captures& captures, Index... indices) {
  const CapturedTensorParam& tensor = captures.tensors[slot];
  [[maybe_unused]] std::int32_t dim = 0;
  std::int64_t offset = 0;
  ((offset += clamped(indices, tensor.shape[dim]) * tensor.strides[dim], ++dim), ...);
  return element_at<Element>(tensor, offset);
}

template <std::int32_t slot>
FOVEA_DEVICE Int int_scalar(const Captures& captures) {
  return captures.scalars[slot];
}
template <std::int32_t slot>
FOVEA_DEVICE bool bool_scalar(const Captures& captures) {
  return captures.scalars[slot] != 0;
}
template <std::int32_t slot>
FOVEA_DEVICE float float_scalar(const Captures& captures) {
  return ptx::bit_cast<float>(captures.scalars[slot]);
}

}  // namespace fovea::cuda::program
