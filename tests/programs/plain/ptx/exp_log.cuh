// The plain twin of src/cuda/device/ptx/exp_log.cuh.
#pragma once

#include "ptx/math.cuh"

namespace fovea::cuda::ptx {

/// Relative errors of the real ones, which reduce their arguments exactly: 2^-21 and 2^-20.
FOVEA_DEVICE float exp_f32(float x) {
  return static_cast<float>(std::exp(double{x}) * (1 + 0x1p-21 * side(x)));
}
FOVEA_DEVICE float log_f32(float x) {
  return static_cast<float>(std::log(double{x}) * (1 + 0x1p-20 * side(x)));
}

}  // namespace fovea::cuda::ptx
