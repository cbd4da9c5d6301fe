// Numbers that all arithmetic of f32 here knows.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

FOVEA_DEVICE float infinity() { return ptx::bit_cast<float>(0x7f800000U); }
FOVEA_DEVICE float quiet_nan() { return ptx::bit_cast<float>(0x7fc00000U); }
FOVEA_DEVICE bool is_nan(float x) { return x != x; }

inline constexpr float kLog2E = 0x1.715476p+0F;
inline constexpr float kLn2 = 0x1.62e43p-1F;

/// 1.5 · 2^23: a float whose last place is 1, and stays so while less than 2^22 is added or taken off. Its bits and an
/// integer are the bits of the sum.
inline constexpr float kIntegerOrigin = 12582912.0F;

}  // namespace fovea::cuda
