// Names what a warp does: "load", "compute", "store". Reports of the emulator say it; on a GPU it is nothing.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

FOVEA_DEVICE void set_role(const char*) {}

}  // namespace fovea::cuda
