// A value of each lane made one of the warp's, which all lanes get.
#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// NaN is passed over.
FOVEA_DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 1; mask < ptx::kWarpLanes; mask *= 2)
    x = ptx::max_ftz(x, ptx::shfl_bfly(x, mask));
  return x;
}

FOVEA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < ptx::kWarpLanes; mask *= 2) x += ptx::shfl_bfly(x, mask);
  return x;
}

}  // namespace fovea::cuda
