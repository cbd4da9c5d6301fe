// Codes of a row times its scale, rounded to the 16 bits that tensor cores multiply. codes.cuh has codes as floats.
//
// int8: a byte whose sign bit is turned over, behind the upper bytes of 2^15, is 2^15 + 128 + code. Scales are rounded
// to 15 bits, so that the origin times one is exact in f32, and one fma gives code times scale. Scales that are too
// large for it, or not finite, take two instructions a code.
#pragma once

#include "common/codes.cuh"
#include "common/element_pair.cuh"
#include "common/f16_codes.cuh"
#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// Four codes as numbers, each product rounded to f32.
template <Codes codes>
struct CodesTimesScale {
  float scale;

  FOVEA_DEVICE_MEMBER explicit CodesTimesScale(float of_row) : scale(of_row) {}
  FOVEA_DEVICE_MEMBER FourNumbers of(std::uint32_t word) const {
    if constexpr (codes == Codes::int8) return numbers_of<codes>(word, scale);
    const F16Pairs pairs = f16_pairs<codes>(word);
    return {{ptx::mul_rn(ptx::f32_of_f16_lo(pairs.first), scale),
             ptx::mul_rn(ptx::f32_of_f16_hi(pairs.first), scale),
             ptx::mul_rn(ptx::f32_of_f16_lo(pairs.second), scale),
             ptx::mul_rn(ptx::f32_of_f16_hi(pairs.second), scale)}};
  }
};

/// The same of int8 by an fma a code, where the origin times the scale is finite.
struct Int8TimesScale {
  static constexpr float kOrigin = 32768.0F + 128.0F;  // nine bits
  static constexpr float kMostScale = 0x1p112F;
  float scale, minus_origin;

  FOVEA_DEVICE_MEMBER explicit Int8TimesScale(float of_row)
      : scale(to_15_bits(of_row)), minus_origin(ptx::mul_rn(scale, -kOrigin)) {}
  FOVEA_DEVICE_MEMBER FourNumbers of(std::uint32_t word) const {
    constexpr std::uint32_t kBits = 0x47000000U;
    constexpr std::uint32_t kBehindItsUpperBytes = 0x7404U;  // for prmt: the byte above bit 8
    const std::uint32_t biased = word ^ 0x80808080U;
    FourNumbers n;
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i) {
      const std::uint32_t integer = ptx::prmt(biased, kBits, kBehindItsUpperBytes | i << 4U);
      n.x[i] = ptx::fma_rn(ptx::bit_cast<float>(integer), scale, minus_origin);
    }
    return n;
  }
  FOVEA_DEVICE bool takes(float of_row) { return ptx::abs(of_row) <= kMostScale; }

 private:
  FOVEA_DEVICE float to_15_bits(float x) {
    return ptx::bit_cast<float>((ptx::bit_cast<std::uint32_t>(x) + 0x100U) & ~0x1ffU);
  }
};

/// Eight of them in 16 bits.
template <Element element, class Numbers>
FOVEA_DEVICE ptx::U32x4 eight_numbers(const Numbers& numbers, std::uint32_t low,
                                      std::uint32_t high) {
  const FourNumbers a = numbers.of(low);
  const FourNumbers b = numbers.of(high);
  return {pair_of<element>(a.x[0], a.x[1]), pair_of<element>(a.x[2], a.x[3]),
          pair_of<element>(b.x[0], b.x[1]), pair_of<element>(b.x[2], b.x[3])};
}

}  // namespace fovea::cuda
