// Exponential and logarithm exact enough for programs, out of the functions of math.cuh: one text for NVIDIA and AMD.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"

namespace fovea::cuda::ptx {

/// e^x for every float, relative error below 2^-21, denormal results rounded once more. The argument is reduced by ln 2
/// in two parts (Cody and Waite 1980), so that the product with log2 e costs no bits; 2^n is applied in two halves,
/// each a normal number.
FOVEA_DEVICE float exp_f32(float x) {
  const float clamped = min_ftz(max_ftz(x, -104.0F), 89.0F);
  const float n = cvt_rni(mul_rn(clamped, 0x1.715476p+0F));
  float r = fma_rn(n, -0x1.62e4p-1F, clamped);
  r = fma_rn(n, -0x1.7f7d1cp-20F, r);
  const float p = ex2_approx_ftz(mul_rn(r, 0x1.715476p+0F));
  const int whole = static_cast<int>(n);
  const int half = whole / 2;
  const float y = mul_rn(mul_rn(p, bit_cast<float>((half + 127) << 23)),
                         bit_cast<float>((whole - half + 127) << 23));
  return x != x ? x : y;
}

/// Natural logarithm for every float, relative error below 2^-20: log1p's series near 1, where lg2.approx has an
/// absolute error only; denormals are scaled up first. log 0 is -inf, negative numbers give NaN.
FOVEA_DEVICE float log_f32(float x) {
  const float u = add_rn(x, -1.0F);
  if (u > -0.25F && u < 0.25F) {
    const float s = div_rn(u, add_rn(u, 2.0F));  // log x = 2 atanh(u / (2 + u))
    const float s2 = mul_rn(s, s);
    const float series =
        fma_rn(s2, fma_rn(s2, fma_rn(s2, 0x1.24924ap-3F, 0x1.99999ap-3F), 0x1.555556p-2F), 1.0F);
    return mul_rn(mul_rn(2.0F, s), series);
  }
  const bool is_small = x < 0x1p-100F;
  const float log2_x = lg2_approx_ftz(is_small ? mul_rn(x, 0x1p+64F) : x);
  return mul_rn(is_small ? add_rn(log2_x, -64.0F) : log2_x, 0x1.62e43p-1F);
}

}  // namespace fovea::cuda::ptx
