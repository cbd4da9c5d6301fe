// The emulated twin of src/cuda/device/ptx/math_f32x2.cuh: one by one.
#pragma once

#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE F32x2 fma_rn_ftz_f32x2(F32x2 a, F32x2 b, F32x2 c, Site site = Site::here()) {
  return {fma_rn_ftz(a.x, b.x, c.x, site), fma_rn_ftz(a.y, b.y, c.y, site)};
}

FOVEA_DEVICE F32x2 add_rn_f32x2(F32x2 a, F32x2 b, Site site = Site::here()) {
  return {add_rn(a.x, b.x, site), add_rn(a.y, b.y, site)};
}

FOVEA_DEVICE F32x2 mul_rn_f32x2(F32x2 a, F32x2 b, Site site = Site::here()) {
  return {mul_rn(a.x, b.x, site), mul_rn(a.y, b.y, site)};
}

}  // namespace fovea::cuda::ptx
