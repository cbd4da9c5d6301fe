// The emulated twin of src/cuda/device/ptx/red.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void red_add_global_v4(float* to, const F32x4& value, Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"red.global.v4", site});
  emulator::reduce_add(to, &value.x, 4, {"red.global.v4", site});
}

FOVEA_DEVICE void red_add_global_v2(float* to, const F32x2& value, Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"red.global.v2", site});
  emulator::reduce_add(to, &value.x, 2, {"red.global.v2", site});
}

FOVEA_DEVICE void red_add_global_v4_bf16x2(void* to, const U32x4& value, Site site = Site::here()) {
  emulator::reduce_add_bf16(to, &value.x, 4, {"red.global.v4.bf16x2", site});
}

}  // namespace fovea::cuda::ptx
