// The emulated twin of src/cuda/device/common/role.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

FOVEA_DEVICE void set_role(const char* role) { emulator::set_role(role); }

}  // namespace fovea::cuda
