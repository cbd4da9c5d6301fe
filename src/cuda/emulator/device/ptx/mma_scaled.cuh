// The emulated twin of src/cuda/device/ptx/mma_scaled.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

enum class GroupScales : std::uint8_t { ue4m3_of_16, ue8m0_of_32 };

template <GroupScales scales, int a_thread, int b_thread>
FOVEA_DEVICE void mma_m16n8k64_e2m1(float (&d)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[2], std::uint32_t a_scales,
                                    std::uint32_t b_scales, Site site = Site::here()) {
  static_assert(a_thread >= 0 && a_thread < 2, "scales of a are in two lanes of each four");
  static_assert(b_thread >= 0 && b_thread < 4, "scales of b are in one lane of each four");
  emulator::mma_scaled({.d = d,
                        .a = a,
                        .b = {b[0], b[1]},
                        .a_scales = a_scales,
                        .b_scales = b_scales,
                        .a_thread = a_thread,
                        .b_thread = b_thread,
                        .group = scales == GroupScales::ue4m3_of_16 ? 16 : 32},
                       {"mma.sync.block_scale", site});
}

FOVEA_DEVICE std::uint32_t cvt_e2m1x8(const float (&x)[8], Site site = Site::here()) {
  std::uint32_t codes = 0;
  for (std::uint32_t i = 0; i < 8; ++i) {
    check_operands("cvt.e2m1x2", site, x[i]);
    codes |= emulator::encode_e2m1(x[i]) << 4 * i;
  }
  return codes;
}

}  // namespace fovea::cuda::ptx
