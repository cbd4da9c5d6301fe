// Numbers of eight and of four bits and their scales: the bit rules that every kernel follows. All arithmetic is f32,
// each operation rounded to nearest even, so that two implementations have the same codes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "fovea/dtype.hpp"

namespace fovea::quant {

inline constexpr float kInt8Max = 127;  // not -128: |q · k| stays below 127² head_dim
inline constexpr float kE4m3Max = 448;
inline constexpr float kE2m1Max = 6;
inline constexpr float kLeastScale =
    0x1p-126F;  // its reciprocal is finite: rows of zeros need no case of their own

/// The bits of |value| in a format with kMantissa bits of mantissa, normal from 2^kLeast on: to nearest, ties to even.
/// Not above the format's greatest number.
template <int kMantissa, int kLeast>
constexpr std::uint32_t nearest_bits(std::uint32_t magnitude) {
  constexpr std::uint32_t kDropped = 23 - kMantissa;
  if (magnitude >= static_cast<std::uint32_t>(127 + kLeast) << 23U) {  // normal: rebias
    const std::uint32_t rebased = magnitude - (static_cast<std::uint32_t>(126 + kLeast) << 23U);
    return (rebased + ((1U << (kDropped - 1)) - 1) + (rebased >> kDropped & 1U)) >> kDropped;
  }
  constexpr auto kSteps = static_cast<float>(1U << (kMantissa - kLeast));  // denormals, of 1
  const float steps = std::bit_cast<float>(magnitude) * kSteps;
  const auto below = static_cast<std::uint32_t>(steps);
  const float rest = steps - static_cast<float>(below);
  const bool rounds_up = rest > 0.5F || (rest == 0.5F && below % 2 == 1);
  return below + static_cast<std::uint32_t>(rounds_up);
}

/// The bits of e4m3 ("fn": no infinity, NaN is 0x7f): to nearest, ties to even, saturated at 448. NaN stays NaN.
constexpr std::uint8_t e4m3_bits(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>(u >> 24U & 0x80U);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint8_t>(sign | 0x7fU);
  const std::uint32_t bits =
      magnitude >= 0x43e00000U ? 0x7eU : nearest_bits<3, -6>(magnitude);  // 448
  return static_cast<std::uint8_t>(sign | bits);
}

constexpr float e4m3_value(std::uint8_t bits) {
  const std::uint32_t sign = (bits & 0x80U) << 24U;
  const std::uint32_t exponent = bits >> 3U & 0xfU;
  const std::uint32_t mantissa = bits & 7U;
  if ((bits & 0x7fU) == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 120U) << 23U | mantissa << 20U);
}

/// The bits of e2m1, exponent bias 1, without infinity and NaN: to nearest, ties to even, saturated at 6, which NaN
/// becomes too.
constexpr std::uint8_t e2m1_bits(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 7;
  const std::uint32_t bits = magnitude >= 0x40c00000U ? 7U : nearest_bits<1, 0>(magnitude);  // 6
  return static_cast<std::uint8_t>((u >> 28U & 8U) | bits);
}

constexpr float e2m1_value(std::uint8_t bits) {
  constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  const float magnitude = kMagnitudes[bits & 7U];
  return (bits & 8U) != 0 ? -magnitude : magnitude;
}

/// ue8m0 is an exponent with bias 127, 0xff NaN; this one never leaves the normal numbers of f32.
constexpr float ue8m0_value(std::uint8_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 23U);
}

/// What numbers of this greatest magnitude, a finite one, are divided by to become e2m1. ue8m0: the least power of two,
/// from 2^-126 on, that saturates none of them, 6 · 2^e at the greatest.
constexpr std::uint8_t ue8m0_scale_bits(float greatest) {
  const auto u = std::bit_cast<std::uint32_t>(greatest);
  const std::uint32_t above =
      (u & 0x7fffffU) > 0x400000U ? 1 : 2;  // of 1.5 · 2^e and less, 2^(e - 2)
  return static_cast<std::uint8_t>(std::max(u >> 23U, above + 1) - above);
}
/// ue4m3, which is e4m3 without a sign: the nearest to a sixth of the greatest, so that a number beyond 6 scales is
/// saturated. 0 where all is lost: a sixth below 2^-10.
constexpr std::uint8_t ue4m3_scale_bits(float greatest) {
  return e4m3_bits(greatest * (1 / kE2m1Max));
}

/// What a group of numbers of this greatest magnitude is divided by, so that it becomes `largest_code`.
inline float scale_of(float greatest, float largest_code) {
  return std::max(greatest / largest_code, kLeastScale);
}

/// A number times the reciprocal of its scale, as the nearest number of a format.
inline float int8_code(float scaled) {
  return std::clamp(std::nearbyint(scaled), -kInt8Max, kInt8Max);
}
inline float e4m3_code(float scaled) { return e4m3_value(e4m3_bits(scaled)); }
inline float e2m1_code(float scaled) { return e2m1_value(e2m1_bits(scaled)); }
inline float f16_code(float value) {  // saturated: an infinity would be no rounding
  return static_cast<float>(float16(std::clamp(value, -65504.0F, 65504.0F)));
}

/// 2^exponent as the value of the e4m3 bits 8 (exponent + 7), rounded: exact at powers of two, a chord between them,
/// denormals coarser. NaN stays NaN.
inline float linear_code(float exponent) {
  if (std::isnan(exponent)) return exponent;
  const float bits = std::clamp(std::nearbyint(8 * (exponent + 7)), 0.0F, 126.0F);
  return e4m3_value(static_cast<std::uint8_t>(bits));
}

/// How much larger than 2^e a linear code is on average, e uniform between two integers: the integral of (1 + f) / 2^f
/// over [0, 1). Sums of codes are divided by it.
inline constexpr double kLinearMean = 1.0406844905028039;

}  // namespace fovea::quant
