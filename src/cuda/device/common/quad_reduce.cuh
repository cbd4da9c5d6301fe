// A value of each lane made one of its quad's, the four lanes that share a row of a fragment: they all get it, with the
// same bits. Read tile/fragment.cuh for the rows. Kernels of f32 and decoding's group_rows.cuh have the steps written
// out: by these functions ptxas gives them other registers.
#pragma once

#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda {

/// NaN is passed over.
FOVEA_DEVICE float quad_max(float x) {
  x = ptx::max_ftz(x, ptx::shfl_bfly(x, 1));
  return ptx::max_ftz(x, ptx::shfl_bfly(x, 2));
}

/// NaN is passed over.
FOVEA_DEVICE float quad_min(float x) {
  x = ptx::min_ftz(x, ptx::shfl_bfly(x, 1));
  return ptx::min_ftz(x, ptx::shfl_bfly(x, 2));
}

FOVEA_DEVICE float quad_sum(float x) {
  x += ptx::shfl_bfly(x, 1);
  return x + ptx::shfl_bfly(x, 2);
}

}  // namespace fovea::cuda
