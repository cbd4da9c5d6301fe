// Numbers of eight bits and their scales: the bit rules that every kernel follows. All arithmetic is f32, each
// operation rounded to nearest even, so that two implementations have the same codes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "fovea/dtype.hpp"

namespace fovea::quant {

inline constexpr float kInt8Max = 127;  // not -128: |q · k| stays below 127² head_dim
inline constexpr float kE4m3Max = 448;
inline constexpr float kLeastScale =
    0x1p-126F;  // its reciprocal is finite: rows of zeros need no case of their own

/// The bits of e4m3 ("fn": no infinity, NaN is 0x7f): to nearest, ties to even, saturated at 448. NaN stays NaN.
constexpr std::uint8_t e4m3_bits(float value) {
  const auto u = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>(u >> 24U & 0x80U);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  std::uint32_t bits = 0;
  if (magnitude > 0x7f800000U) {
    bits = 0x7f;
  } else if (magnitude >= 0x43e00000U) {  // 448
    bits = 0x7e;
  } else if (magnitude >= 0x3c800000U) {  // normal, from 2^-6 on: rebias
    const std::uint32_t rebased = magnitude - (120U << 23U);
    bits = (rebased + 0x7ffffU + (rebased >> 20U & 1U)) >> 20U;
  } else {  // denormal: multiples of 2^-9
    const float steps = std::bit_cast<float>(magnitude) * 512;
    const auto below = static_cast<std::uint32_t>(steps);
    const float rest = steps - static_cast<float>(below);
    const bool rounds_up = rest > 0.5F || (rest == 0.5F && below % 2 == 1);
    bits = below + static_cast<std::uint32_t>(rounds_up);
  }
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

/// What a group of numbers of this greatest magnitude is divided by, so that it becomes `largest_code`.
inline float scale_of(float greatest, float largest_code) {
  return std::max(greatest / largest_code, kLeastScale);
}

/// A number times the reciprocal of its scale, as the nearest number of a format.
inline float int8_code(float scaled) {
  return std::clamp(std::nearbyint(scaled), -kInt8Max, kInt8Max);
}
inline float e4m3_code(float scaled) { return e4m3_value(e4m3_bits(scaled)); }
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
