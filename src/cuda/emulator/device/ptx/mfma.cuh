// The emulated twin of src/cuda/amd/ptx/mfma.cuh.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

inline constexpr int kMfmaSums = 16;

template <Element element>
inline constexpr auto kMfmaFormat =
    element == Element::bf16 ? emulator::Format::bf16 : emulator::Format::f16;

template <Element element>
FOVEA_DEVICE void mfma_32x32x8(float (&d)[kMfmaSums], const U32x2& a, const U32x2& b,
                               Site site = Site::here()) {
  static_assert(element != Element::f32, "mfma_32x32x8 multiplies bf16 or f16");
  emulator::mfma(kMfmaFormat<element>, 8, d, &a.x, &b.x, {"v_mfma_f32_32x32x8", site});
}

template <Element element>
FOVEA_DEVICE void mfma_32x32x16(float (&d)[kMfmaSums], const U32x4& a, const U32x4& b,
                                Site site = Site::here()) {
  static_assert(element != Element::f32, "mfma_32x32x16 multiplies bf16 or f16");
  emulator::mfma(kMfmaFormat<element>, 16, d, &a.x, &b.x, {"v_mfma_f32_32x32x16", site});
}

}  // namespace fovea::cuda::ptx
