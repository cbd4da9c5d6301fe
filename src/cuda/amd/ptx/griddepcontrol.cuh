// The AMD twin of src/cuda/device/ptx/griddepcontrol.cuh: a grid starts when the one ahead of it has ended.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void griddepcontrol_wait() {}
FOVEA_DEVICE void griddepcontrol_launch_dependents() {}

}  // namespace fovea::cuda::ptx
