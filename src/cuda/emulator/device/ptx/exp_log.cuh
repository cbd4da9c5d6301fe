// The emulated twin of src/cuda/device/ptx/exp_log.cuh: those of the host, which are nearer.
#pragma once

#include "ptx/math.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE float exp_f32(float x, Site site = Site::here()) {
  check_operands("exp_f32", site, x);
  return std::exp(x);
}

FOVEA_DEVICE float log_f32(float x, Site site = Site::here()) {
  check_operands("log_f32", site, x);
  return std::log(x);
}

}  // namespace fovea::cuda::ptx
