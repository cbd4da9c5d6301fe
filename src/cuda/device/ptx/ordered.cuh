// Arithmetic that stays where it is written: the functions of math.cuh as volatile asm. Between the issue of a wgmma
// and the wait for it the compiler would sink plain exponentials behind the wait and gather conversions at its end;
// volatile statements keep their order among themselves, so a kernel can lay out its own pipeline of exponentials, sums
// and conversions.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// ex2.approx.ftz.f32, relative error 2^-22.
FOVEA_DEVICE float ordered_ex2_approx_ftz(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// fma.rn.ftz.f32: a b + c.
FOVEA_DEVICE float ordered_fma_rn_ftz(float a, float b, float c) {
  float y;
  asm volatile("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}

/// add.rn.ftz.f32.
FOVEA_DEVICE float ordered_add_rn_ftz(float a, float b) {
  float y;
  asm volatile("add.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// lop3: a & b | c.
FOVEA_DEVICE std::uint32_t ordered_and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm volatile("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/// mad.lo.u32: the low word of a b + c.
FOVEA_DEVICE std::uint32_t ordered_mad_lo(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm volatile("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/// cvt.rn.bf16x2.f32: `lo` in the low half.
FOVEA_DEVICE std::uint32_t ordered_cvt_bf16x2(float lo, float hi) {
  std::uint32_t pair;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

/// cvt.rn.f16x2.f32: `lo` in the low half.
FOVEA_DEVICE std::uint32_t ordered_cvt_f16x2(float lo, float hi) {
  std::uint32_t pair;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}

}  // namespace fovea::cuda::ptx
