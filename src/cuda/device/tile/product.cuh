// Products of 16 elements of depth by one warp, on whichever tensor cores there are. Operands lie in registers as
// fragment.cuh has them: the halves of one m16n8k16 are two m16n8k8, so nothing else of a kernel knows which.
#pragma once

#include "ptx/mma.cuh"
#include "shared/element.h"
#include "shared/instructions.h"

namespace fovea::cuda {

/// d += a b.
template <Element element, Instructions instructions>
FOVEA_DEVICE void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  if constexpr (instructions == Instructions::sm75) {
    static_assert(element == Element::f16, "sm_75 multiplies f16");
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
  } else {
    ptx::mma_m16n8k16<element>(d, a, b0, b1);
  }
}

}  // namespace fovea::cuda
