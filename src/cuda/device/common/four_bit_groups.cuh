// Numbers that share a scale as codes of four bits: e2m1, by e4m3 for 16 numbers or by a power of two for 32. What
// decides a code is f32, each operation rounded to nearest even, as src/reference/quantized.cpp has it: codes and
// scales of Q, K and V have defined bits.
#pragma once

#include "ptx/math.cuh"
#include "ptx/mma_scaled.cuh"

namespace fovea::cuda {

inline constexpr float kOneSixth =
    1.0F / 6;  // of a group's greatest magnitude, its scale: 6 is the greatest code

/// What scales of e4m3 stand for: their bits moved to those of a float, whose exponents are 120 less.
FOVEA_DEVICE float value_of_scale(std::uint32_t e4m3) {
  return ptx::mul_rn(ptx::bit_cast<float>(e4m3 << 20), 0x1p120F);
}

/// The least power of two, from 2^-126 on, that saturates no number up to `greatest`: the bits of ue8m0.
FOVEA_DEVICE std::uint32_t power_of_two_bits(float greatest) {
  const auto bits = ptx::bit_cast<std::uint32_t>(greatest);
  const std::uint32_t above = (bits & 0x7fffffU) > 0x400000U ? 1 : 2;  // 6 is 1.5 · 2^2
  const std::uint32_t exponent = bits >> 23;
  return (exponent > above ? exponent : above + 1) - above;
}
FOVEA_DEVICE float reciprocal_of_power(std::uint32_t ue8m0) {
  return ptx::bit_cast<float>((254U - ue8m0) << 23);
}

/// The scale of a group, and what makes its numbers codes: 0 where the scale is, for all is lost.
struct GroupScale {
  std::uint32_t bits;
  float reciprocal;
};
template <int group>
FOVEA_DEVICE GroupScale scale_of_group(float greatest) {
  if constexpr (group == 16) {
    const std::uint32_t bits = ptx::cvt_e4m3x2(ptx::mul_rn(greatest, kOneSixth), 0.0F);
    return {bits, bits == 0 ? 0.0F : ptx::div_rn(1.0F, value_of_scale(bits))};
  } else {
    const std::uint32_t bits = power_of_two_bits(greatest);
    return {bits, reciprocal_of_power(bits)};
  }
}

/// Eight of a group's numbers.
FOVEA_DEVICE std::uint32_t codes_of_eight(const float* x, float reciprocal) {
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = ptx::mul_rn(x[i], reciprocal);
  return ptx::cvt_e2m1x8(scaled);
}

}  // namespace fovea::cuda
