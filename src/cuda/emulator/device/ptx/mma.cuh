// The emulated twin of src/cuda/device/ptx/mma.cuh.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

FOVEA_DEVICE U32x4 ldmatrix_x4(SharedAddress row, Site site = Site::here()) {
  U32x4 r;
  emulator::ldmatrix(row, 4, false, &r.x, {"ldmatrix", site});
  return r;
}

FOVEA_DEVICE U32x4 ldmatrix_x4_trans(SharedAddress row, Site site = Site::here()) {
  U32x4 r;
  emulator::ldmatrix(row, 4, true, &r.x, {"ldmatrix.trans", site});
  return r;
}

FOVEA_DEVICE U32x2 ldmatrix_x2(SharedAddress row, Site site = Site::here()) {
  U32x2 r;
  emulator::ldmatrix(row, 2, false, &r.x, {"ldmatrix", site});
  return r;
}

FOVEA_DEVICE U32x2 ldmatrix_x2_trans(SharedAddress row, Site site = Site::here()) {
  U32x2 r;
  emulator::ldmatrix(row, 2, true, &r.x, {"ldmatrix.trans", site});
  return r;
}

FOVEA_DEVICE void stmatrix_x4(SharedAddress row, const U32x4& value, Site site = Site::here()) {
  emulator::stmatrix(row, 4, false, &value.x, {"stmatrix", site});
}

FOVEA_DEVICE void stmatrix_x4_trans(SharedAddress row, const U32x4& value,
                                    Site site = Site::here()) {
  emulator::stmatrix(row, 4, true, &value.x, {"stmatrix.trans", site});
}

template <Element element>
FOVEA_DEVICE void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1, Site site = Site::here()) {
  static_assert(element == Element::bf16 || element == Element::f16,
                "mma_m16n8k16 multiplies bf16 or f16");
  constexpr auto kFormat =
      element == Element::bf16 ? emulator::Format::bf16 : emulator::Format::f16;
  emulator::mma(kFormat, d, a, b0, b1, {"mma.sync", site});
}

FOVEA_DEVICE void mma_m16n8k8_f16(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                  std::uint32_t b, Site site = Site::here()) {
  emulator::mma_k8_f16(d, a0, a1, b, {"mma.sync.m16n8k8", site});
}

FOVEA_DEVICE void mma_m16n8k32_s8(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                  std::uint32_t b1, Site site = Site::here()) {
  emulator::mma(emulator::Format::s8, d, a, b0, b1, {"mma.sync.s8", site});
}

FOVEA_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1, Site site = Site::here()) {
  emulator::mma(emulator::Format::e4m3, d, a, b0, b1, {"mma.sync.e4m3", site});
}

FOVEA_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                   std::uint32_t b1, Site site = Site::here()) {
  emulator::mma(emulator::Format::tf32, d, a, b0, b1, {"mma.sync.tf32", site});
}

}  // namespace fovea::cuda::ptx
