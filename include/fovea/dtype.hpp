// Element types, the two 16-bit floats and the 8-bit one. Read tensor.hpp next.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace fovea {

enum class Dtype : std::uint8_t { f32, f16, bf16, boolean, u8, i8, i32, i64, e4m3 };

constexpr std::size_t size_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
    case Dtype::i32:
      return 4;
    case Dtype::f16:
    case Dtype::bf16:
      return 2;
    case Dtype::i64:
      return 8;
    case Dtype::boolean:
    case Dtype::u8:
    case Dtype::i8:
    case Dtype::e4m3:
      return 1;
  }
  return 0;
}

constexpr std::string_view name(Dtype dtype) {
  constexpr std::string_view kNames[] = {"f32", "f16", "bf16", "bool", "u8",
                                         "i8",  "i32", "i64",  "e4m3"};
  return kNames[static_cast<int>(dtype)];
}

constexpr bool is_float(Dtype dtype) { return dtype <= Dtype::bf16; }

/// bfloat16 as stored: the upper half of an IEEE float. Conversion rounds to nearest even and quiets NaN.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() = default;
  constexpr explicit bfloat16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (u & 0x7fffffffU) > 0x7f800000U;
    bits = static_cast<std::uint16_t>(is_nan ? (u >> 16U) | 0x40U
                                             : (u + 0x7fffU + ((u >> 16U) & 1U)) >> 16U);
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
  static constexpr bfloat16 from_bits(std::uint16_t bits) {
    bfloat16 result;
    result.bits = bits;
    return result;
  }
};

/// IEEE binary16 as stored. Conversion rounds to nearest even, keeps denormals and quiets NaN.
struct float16 {
  std::uint16_t bits = 0;

  constexpr float16() = default;
  constexpr explicit float16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (u >> 16U) & 0x8000U;
    const std::uint32_t magnitude = u & 0x7fffffffU;
    std::uint32_t half = 0;
    if (magnitude > 0x7f800000U) {
      half = 0x7e00U;  // NaN
    } else if (magnitude >= 0x477ff000U) {
      half = 0x7c00U;                       // rounds to infinity
    } else if (magnitude >= 0x38800000U) {  // normal: rebias, round to nearest even
      const std::uint32_t rebased = magnitude - 0x38000000U;
      half = (rebased + 0xfffU + ((rebased >> 13U) & 1U)) >> 13U;
    } else if (magnitude >= 0x33000000U) {  // denormal: align the implicit one
      const std::uint32_t shift = 126U - (magnitude >> 23U);
      const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
      const std::uint32_t halfway = 1U << (shift - 1U);
      half = (mantissa + halfway - 1U + ((mantissa >> shift) & 1U)) >> shift;
    }
    bits = static_cast<std::uint16_t>(sign | half);
  }
  constexpr explicit operator float() const {
    const std::uint32_t sign = (bits & 0x8000U) << 16U;
    const std::uint32_t exponent = (bits >> 10U) & 0x1fU;
    const std::uint32_t mantissa = bits & 0x3ffU;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13U));
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
      return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23U) | (mantissa << 13U));
  }
  static constexpr float16 from_bits(std::uint16_t bits) {
    float16 result;
    result.bits = bits;
    return result;
  }
};

/// Eight bits as stored: sign, 4 of exponent (bias 7), 3 of mantissa; no infinity, NaN is 0x7f. What a cache of codes
/// holds (kv_cache.hpp), which writes and reads them; and q, k and v of a forward call that gives their scales.
struct float8_e4m3 {
  std::uint8_t bits = 0;
};

/// The Dtype of a C++ element type. Types that no tensor holds (double, wide unsigned integers, structs) have none:
/// view() of them does not compile.
template <typename T>
struct ElementDtype;
template <>
struct ElementDtype<float> : std::integral_constant<Dtype, Dtype::f32> {};
template <>
struct ElementDtype<float16> : std::integral_constant<Dtype, Dtype::f16> {};
template <>
struct ElementDtype<bfloat16> : std::integral_constant<Dtype, Dtype::bf16> {};
template <>
struct ElementDtype<bool> : std::integral_constant<Dtype, Dtype::boolean> {};
template <>
struct ElementDtype<std::uint8_t> : std::integral_constant<Dtype, Dtype::u8> {};
template <>
struct ElementDtype<std::int8_t> : std::integral_constant<Dtype, Dtype::i8> {};
template <>
struct ElementDtype<std::int32_t> : std::integral_constant<Dtype, Dtype::i32> {};
template <>
struct ElementDtype<float8_e4m3> : std::integral_constant<Dtype, Dtype::e4m3> {};
/// long and long long, whichever of them std::int64_t is.
template <std::signed_integral T>
requires(sizeof(T) == sizeof(std::int64_t)) struct ElementDtype<T>
    : std::integral_constant<Dtype, Dtype::i64> {
};

template <typename T>
concept Element = requires {
  ElementDtype<T>::value;
};

template <Element T>
inline constexpr Dtype dtype_of = ElementDtype<T>::value;

}  // namespace fovea
