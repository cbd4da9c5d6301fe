// Codes of 8 bits as numbers, and numbers as codes: the bit rules of caches. src/quant/row_codes.hpp has them for the
// host; both give the same bits.
#pragma once

#include "common/float_constants.cuh"
#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/element.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

constexpr float largest_code(Codes codes) { return codes == Codes::int8 ? 127.0F : 448.0F; }

/// Where the scale of a row and head lies.
FOVEA_DEVICE float* scale_at(const ScaleParam& scale, std::int64_t sequence, std::int64_t slot,
                             std::int64_t row, std::int64_t head) {
  return scale.data + sequence * scale.sequence_stride + slot * scale.slot_stride +
         row * scale.row_stride + head * scale.head_stride;
}

// ---- codes to numbers --------------------------------------------------------------------------

/// Of four codes side by side in a word, the first in its lowest bits.
struct FourNumbers {
  float x[4];
};

/// A byte, its sign bit turned over, is the code and 128; behind the bits of 2^23 it is a float.
FOVEA_DEVICE FourNumbers numbers_of_int8(std::uint32_t word, float scale) {
  const std::uint32_t biased = word ^ 0x80808080U;
  constexpr std::uint32_t kIntegerBits = 0x4b000000U;
  constexpr std::uint32_t kItsUpperBytes = 0x7440U;  // for prmt, behind a byte of the word
  constexpr float kOrigin = 8388608.0F + 128.0F;
  FourNumbers n;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t integer = ptx::prmt(biased, kIntegerBits, kItsUpperBytes | i);
    n.x[i] = ptx::mul_rn(ptx::bit_cast<float>(integer) - kOrigin, scale);
  }
  return n;
}

/// Not 0 where one of a word's codes is NaN, which conversions take for 480.
template <Codes codes>
FOVEA_DEVICE std::uint32_t nan_bits(std::uint32_t word) {
  if constexpr (codes == Codes::int8) return 0;
  return ((word & 0x7f7f7f7fU) + 0x01010101U) & 0x80808080U;
}

/// By way of f16, which has an exponent of a bit more and is 2^-8 of the number, denormals too. NaN, which is 480 then,
/// is looked for in all four at once.
FOVEA_DEVICE FourNumbers numbers_of_e4m3(std::uint32_t word, float scale) {
  const float factor = 256.0F * scale;
  FourNumbers n;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t pair = half == 0 ? word : word >> 16;
    const std::uint32_t upper = (pair & 0xffU) << 8 | (pair & 0xff00U) << 16;
    const std::uint32_t f16 = (upper & 0x80008000U) | (upper & 0x7f007f00U) >> 1;
    n.x[2 * half] = ptx::mul_rn(ptx::f32_of_f16_lo(f16), factor);
    n.x[2 * half + 1] = ptx::mul_rn(ptx::f32_of_f16_hi(f16), factor);
  }
  if (nan_bits<Codes::e4m3>(word) != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((word >> (8 * i) & 0x7fU) == 0x7fU) n.x[i] = quiet_nan();
    }
  }
  return n;
}

/// Codes times their scale, each product rounded to f32.
template <Codes codes>
FOVEA_DEVICE FourNumbers numbers_of(std::uint32_t word, float scale) {
  static_assert(codes != Codes::none);
  if constexpr (codes == Codes::int8) return numbers_of_int8(word, scale);
  return numbers_of_e4m3(word, scale);
}

/// Two codes as a pair of bf16, which holds them exactly: byte `lo` of a, byte `hi` of b.
///
/// int8: the lower seven bits of a code behind those of 128 are 128 and they; the sign bit behind those of 128 makes
/// 256 of it, so that the difference is the code. e4m3: its bits are those of a bf16 of 2^-120 of the number.
template <Codes codes>
FOVEA_DEVICE std::uint32_t bf16_pair(std::uint32_t a, std::uint32_t b, int lo, int hi) {
  static_assert(codes != Codes::none);
  const auto selector = static_cast<std::uint32_t>(lo | lo << 4 | (4 + hi) << 8 | (4 + hi) << 12);
  const std::uint32_t twice = ptx::prmt(a, b, selector);  // each in both bytes of its half
  if constexpr (codes == Codes::int8) {
    constexpr std::uint32_t k128 = 0x43004300U, kMinusOne = 0xbf80bf80U;
    const std::uint32_t magnitude = ptx::and_or(twice, 0x007f007fU, k128);
    const std::uint32_t sign = ptx::and_or(twice, 0x00800080U, k128);
    return ptx::fma_bf16x2(sign, kMinusOne, magnitude);
  }
  constexpr std::uint32_t kTwoTo120 = 0x7b807b80U;
  const std::uint32_t magnitude = twice >> 4 & 0x07f007f0U;
  return ptx::mul_bf16x2(ptx::and_or(twice, 0x80008000U, magnitude), kTwoTo120);
}

// ---- numbers to codes --------------------------------------------------------------------------

/// To nearest even, saturated; NaN, whose row has scale NaN, becomes 0.
FOVEA_DEVICE std::uint32_t int8_of(float scaled) {
  if (is_nan(scaled)) return 0;
  const float limited = ptx::min_ftz(ptx::max_ftz(scaled, -127.0F), 127.0F);
  return ptx::bit_cast<std::uint32_t>(ptx::add_rn(limited, kIntegerOrigin)) & 0xffU;
}

/// To nearest even, saturated; NaN stays NaN.
FOVEA_DEVICE std::uint32_t e4m3_of(float scaled) {
  const auto bits = ptx::bit_cast<std::uint32_t>(scaled);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return sign | 0x7fU;
  if (magnitude >= 0x43e00000U) return sign | 0x7eU;  // 448
  if (magnitude >= 0x3c800000U) {                     // 2^-6: exponents are rebased
    const std::uint32_t rebased = magnitude - (120U << 23);
    return sign | (rebased + 0x7ffffU + (rebased >> 20 & 1U)) >> 20;
  }
  // Multiples of 2^-9: an integer of 0 to 8, rounded by what it is added to.
  const float steps = ptx::add_rn(ptx::bit_cast<float>(magnitude) * 512.0F, 8388608.0F);
  return sign | (ptx::bit_cast<std::uint32_t>(steps) & 0xfU);
}

FOVEA_DEVICE std::uint32_t code_of(Codes codes, float scaled) {
  return codes == Codes::int8 ? int8_of(scaled) : e4m3_of(scaled);
}

}  // namespace fovea::cuda
