// The emulated twin of src/cuda/device/ptx/griddepcontrol.cuh: one grid runs at a time.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void griddepcontrol_wait() {}
FOVEA_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace fovea::cuda::ptx
