// Arithmetic of one thread of the host. The approximations err by all that the PTX ISA allows, up or down as the
// operand's bits have it.
#pragma once

#include <cmath>

#include "fovea/dtype.hpp"

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE float ftz(float x) { return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x; }

/// 1 or -1, as by the toss of a coin.
FOVEA_DEVICE double side(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x) * 0x9e3779b9U;
  return (bits >> 20 & 1U) != 0 ? 1 : -1;
}

FOVEA_DEVICE float ex2_approx_ftz(float x) {
  const double exact = std::exp2(double{ftz(x)});
  return ftz(static_cast<float>(exact * (1 + 0x1p-22 * side(x))));
}

/// Exact at powers of two, as the hardware is.
FOVEA_DEVICE float lg2_approx_ftz(float x) {
  const double exact = std::log2(double{ftz(x)});
  if (exact == std::floor(exact)) return static_cast<float>(exact);
  const bool is_near_one = 0.5F < x && x < 2;
  return static_cast<float>(exact + 0x1p-22 * side(x) * (is_near_one ? 1 : std::fabs(exact)));
}

/// One ulp: 2^-23 of a power of two.
FOVEA_DEVICE float rcp_approx_ftz(float x) {
  const float exact = 1.0F / ftz(x);
  if (!std::isfinite(exact) || exact == 0) return exact;
  return ftz(std::nextafterf(exact, side(x) > 0 ? INFINITY : -INFINITY));
}

FOVEA_DEVICE float tanh_approx(float x) {
  return static_cast<float>(std::tanh(double{x}) * (1 + 0x1p-11 * side(x)));
}

FOVEA_DEVICE float fma_rn_ftz(float a, float b, float c) {
  return ftz(std::fma(ftz(a), ftz(b), ftz(c)));
}
FOVEA_DEVICE float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
FOVEA_DEVICE float add_rn(float a, float b) { return a + b; }
FOVEA_DEVICE float mul_rn(float a, float b) { return a * b; }
FOVEA_DEVICE float div_rn(float a, float b) { return a / b; }
FOVEA_DEVICE float sqrt_rn(float x) { return std::sqrt(x); }
FOVEA_DEVICE float abs(float x) { return std::fabs(x); }
FOVEA_DEVICE float abs_ftz(float x) { return std::fabs(ftz(x)); }
FOVEA_DEVICE float max_ftz(float a, float b) { return std::fmax(ftz(a), ftz(b)); }
FOVEA_DEVICE float min_ftz(float a, float b) { return std::fmin(ftz(a), ftz(b)); }
FOVEA_DEVICE float max_nan(float a, float b) {
  return a != a || b != b ? std::nanf("") : std::fmax(a, b);
}

FOVEA_DEVICE float f32_of_bf16_lo(std::uint32_t pair) { return bit_cast<float>(pair << 16); }
FOVEA_DEVICE float f32_of_f16_lo(std::uint32_t pair) {
  return static_cast<float>(float16::from_bits(static_cast<std::uint16_t>(pair)));
}

}  // namespace fovea::cuda::ptx
