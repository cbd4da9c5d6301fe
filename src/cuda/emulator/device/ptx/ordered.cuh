// The emulated twin of src/cuda/device/ptx/ordered.cuh: order among instructions of one thread is the program's here.
#pragma once

#include "ptx/math.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE float ordered_ex2_approx_ftz(float x, Site site = Site::here()) {
  return ex2_approx_ftz(x, site);
}

FOVEA_DEVICE float ordered_fma_rn_ftz(float a, float b, float c, Site site = Site::here()) {
  return fma_rn_ftz(a, b, c, site);
}

FOVEA_DEVICE float ordered_add_rn_ftz(float a, float b, Site site = Site::here()) {
  return ftz(add_rn(ftz(a), ftz(b), site));
}

FOVEA_DEVICE std::uint32_t ordered_and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return (a & b) | c;
}

FOVEA_DEVICE std::uint32_t ordered_mad_lo(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return a * b + c;
}

FOVEA_DEVICE std::uint32_t ordered_cvt_bf16x2(float lo, float hi, Site site = Site::here()) {
  return cvt_bf16x2(lo, hi, site);
}

FOVEA_DEVICE std::uint32_t ordered_cvt_f16x2(float lo, float hi, Site site = Site::here()) {
  return cvt_f16x2(lo, hi, site);
}

}  // namespace fovea::cuda::ptx
