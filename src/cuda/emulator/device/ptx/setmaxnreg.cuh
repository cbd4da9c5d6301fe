// The emulated twin of src/cuda/device/ptx/setmaxnreg.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

template <int num_registers>
FOVEA_DEVICE void setmaxnreg_inc(Site site = Site::here()) {
  static_assert(num_registers >= 24 && num_registers <= 256 && num_registers % 8 == 0);
  emulator::setmaxnreg(num_registers, true, {"setmaxnreg.inc", site});
}

template <int num_registers>
FOVEA_DEVICE void setmaxnreg_dec(Site site = Site::here()) {
  static_assert(num_registers >= 24 && num_registers <= 256 && num_registers % 8 == 0);
  emulator::setmaxnreg(num_registers, false, {"setmaxnreg.dec", site});
}

}  // namespace fovea::cuda::ptx
