// Two neighbouring elements of 16 bits, as tensor cores take them: the first in the low half.
#pragma once

#include "ptx/math.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// Rounded.
template <Element element>
FOVEA_DEVICE std::uint32_t pair_of(float lo, float hi) {
  if constexpr (element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
  return ptx::cvt_f16x2(lo, hi);
}
template <Element element>
FOVEA_DEVICE float low_of(std::uint32_t pair) {
  if constexpr (element == Element::bf16) return ptx::f32_of_bf16_lo(pair);
  return ptx::f32_of_f16_lo(pair);
}
template <Element element>
FOVEA_DEVICE float high_of(std::uint32_t pair) {
  if constexpr (element == Element::bf16) return ptx::f32_of_bf16_hi(pair);
  return ptx::f32_of_f16_hi(pair);
}

}  // namespace fovea::cuda
