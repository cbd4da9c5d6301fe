// The emulated twin of src/cuda/device/ptx/griddepcontrol.cuh.
#pragma once

#include "cuda/emulator/instructions.hpp"
#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void griddepcontrol_wait() { emulator::wait_for_grid_before(); }
FOVEA_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace fovea::cuda::ptx
