// One thread of the host, which has no others. Templates of common/ that name more of these functions are not called.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE bool vote_any(bool is_mine) { return is_mine; }

}  // namespace fovea::cuda::ptx
