// Numbers of fewer bits than a float, decoded and rounded in plain arithmetic.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/emulator/instructions.hpp"

namespace fovea::cuda::emulator {

inline float decode_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

inline float decode_tf32(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000U); }

/// Any float of `exponent_bits` and `mantissa_bits`, with infinities where `has_infinity` (else only all ones is NaN).
inline float decode_small_float(std::uint32_t bits, int exponent_bits, int mantissa_bits,
                                bool has_infinity) {
  const std::uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  const std::uint32_t top = (1U << exponent_bits) - 1;
  const std::uint32_t exponent = bits >> mantissa_bits & top;
  const bool is_negative = bits >> (mantissa_bits + exponent_bits) & 1U;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  float value = 0;
  if (exponent == top && has_infinity) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == top && !has_infinity && mantissa == (1U << mantissa_bits) - 1) {
    value = NAN;
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1U << mantissa_bits)),
                       static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return is_negative ? -value : value;
}

inline float decode_f16(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> 10 & 0x1fU;
  if (exponent == 0 || exponent == 0x1fU) return decode_small_float(bits, 5, 10, true);
  return std::bit_cast<float>((bits & 0x8000U) << 16 | ((bits & 0x7fffU) + (112U << 10)) << 13);
}

inline std::uint32_t encode_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1U)) >> 16;
}

/// To nearest even; beyond 65520 infinity.
inline std::uint32_t encode_f16(float value) {
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(value) >> 16 & 0x8000U;
  if (std::isnan(value)) return 0x7fff;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0F) return sign | 0x7c00U;
  if (magnitude < 0x1p-14F)
    return sign | static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  return sign | (((bits + 0xfffU + (bits >> 13 & 1U)) >> 13) - (112U << 10));
}

/// To nearest even, at most 448 of either sign; NaN is 0x7f.
inline std::uint32_t encode_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(value) >> 24 & 0x80U;
  const float magnitude = std::fmin(std::fabs(value), 448.0F);
  if (magnitude < 0x1p-6F)
    return sign | static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 9)));
  const auto bits = std::bit_cast<std::uint32_t>(magnitude);
  return sign | (((bits + 0x7ffffU + (bits >> 20 & 1U)) >> 20) - (120U << 3));
}

/// Four bits: to nearest even, at most 6 of either sign, which NaN becomes.
inline std::uint32_t encode_e2m1(float value) {
  if (std::isnan(value)) return 7;
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(value) >> 28 & 8U;
  const float magnitude = std::fmin(std::fabs(value), 6.0F);
  const float unit = magnitude < 2 ? 0.5F : magnitude < 4 ? 1.0F : 2.0F;
  const float rounded = std::nearbyint(magnitude / unit) * unit;
  const auto whole = static_cast<std::uint32_t>(2 * rounded);  // 0, 1, 2, 3, 4, 6, 8 or 12
  return sign | (whole <= 4 ? whole : whole == 6 ? 5U : whole == 8 ? 6U : 7U);
}

inline float decode_e2m1(std::uint32_t bits) {
  constexpr float kMagnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  return (bits & 8U) != 0 ? -kMagnitudes[bits & 7U] : kMagnitudes[bits & 7U];
}

/// A power of two; all ones is NaN.
inline float decode_ue8m0(std::uint32_t bits) {
  return bits == 0xff ? NAN : std::ldexp(1.0F, static_cast<int>(bits) - 127);
}

/// What each of the 256 codes stands for.
inline std::array<float, 256> small_floats(int exponent_bits, int mantissa_bits,
                                           bool has_infinity) {
  std::array<float, 256> values{};
  for (std::uint32_t bits = 0; bits < values.size(); ++bits)
    values[bits] = decode_small_float(bits, exponent_bits, mantissa_bits, has_infinity);
  return values;
}
inline const std::array<float, 256> e4m3_values = small_floats(4, 3, false);
inline const std::array<float, 256> e5m2_values = small_floats(5, 2, true);

/// Bytes of one element.
constexpr std::uint32_t element_bytes(Format format) {
  switch (format) {
    case Format::f32:
    case Format::tf32:
      return 4;
    case Format::f16:
    case Format::bf16:
      return 2;
    case Format::e4m3:
    case Format::e5m2:
    case Format::s8:
    case Format::u8:
      return 1;
  }
  return 0;
}

inline float decode(Format format, std::uint32_t bits) {
  switch (format) {
    case Format::f32:
      return std::bit_cast<float>(bits);
    case Format::tf32:
      return decode_tf32(bits);
    case Format::f16:
      return decode_f16(bits);
    case Format::bf16:
      return decode_bf16(bits);
    case Format::e4m3:
      return e4m3_values[bits & 0xffU];
    case Format::e5m2:
      return e5m2_values[bits & 0xffU];
    case Format::s8:
      return static_cast<float>(static_cast<std::int8_t>(bits));
    case Format::u8:
      return static_cast<float>(bits);
  }
  return 0;
}

}  // namespace fovea::cuda::emulator
