// Arithmetic of one thread: the approximations that softmax runs on, conversions between widths, and exact forms.
// Errors are those that the PTX ISA states. With .ftz, denormal inputs and results are zero of the same sign.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

// ---- approximations ----------------------------------------------------------------------------

/// ex2.approx.ftz (Floating Point): 2^x, relative error below 2^-22; -inf gives 0.
FOVEA_DEVICE float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// lg2.approx.ftz (Floating Point): log2 x, absolute error below 2^-22 for x in (0.5, 2), relative error below 2^-22
/// elsewhere.
FOVEA_DEVICE float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// rcp.approx.ftz (Floating Point): 1 / x, at most 1 ulp.
FOVEA_DEVICE float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// tanh.approx (Floating Point): relative error below 2^-11.
FOVEA_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- rounded once ------------------------------------------------------------------------------

/// fma.rn.ftz (Floating Point): a b + c.
FOVEA_DEVICE float fma_rn_ftz(float a, float b, float c) {
  float d;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

/// fma.rn (Floating Point): a b + c, denormals kept.
FOVEA_DEVICE float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

/// add.rn (Floating Point): never fused with a product.
FOVEA_DEVICE float add_rn(float a, float b) {
  float c;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// mul.rn (Floating Point): never fused with a sum.
FOVEA_DEVICE float mul_rn(float a, float b) {
  float c;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// div.rn (Floating Point).
FOVEA_DEVICE float div_rn(float a, float b) {
  float c;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// sqrt.rn (Floating Point).
FOVEA_DEVICE float sqrt_rn(float x) {
  float y;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// cvt.rni (Data Movement): the nearest whole number, ties to even.
FOVEA_DEVICE float cvt_rni(float x) {
  float y;
  asm("cvt.rni.f32.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// max.ftz (Floating Point): a NaN operand gives way to the other one.
FOVEA_DEVICE float max_ftz(float a, float b) {
  float c;
  asm("max.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// min.ftz (Floating Point): a NaN operand gives way to the other one.
FOVEA_DEVICE float min_ftz(float a, float b) {
  float c;
  asm("min.ftz.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// abs and abs.ftz (Floating Point). ptxas makes them modifiers of the operand that they become where its instruction
/// treats denormals alike; else each is one of its own.
FOVEA_DEVICE float abs(float x) {
  float y;
  asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FOVEA_DEVICE float abs_ftz(float x) {
  float y;
  asm("abs.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// max.NaN (Floating Point): a NaN operand gives NaN. Below sm_80 by the maximum of numbers.
FOVEA_DEVICE float max_nan(float a, float b) {
  float c;
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
#else
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  if (a != a || b != b) c = add_rn(a, b);
#endif
  return c;
}

// ---- widths ------------------------------------------------------------------------------------

/// cvt.rn.bf16x2.f32 (Data Movement): `lo` in bits 0..15, `hi` in bits 16..31, to nearest even; NaN is 0x7fff. Below
/// sm_80, which has no bf16, by arithmetic of integers.
FOVEA_DEVICE std::uint32_t cvt_bf16x2(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
#else
  const auto rounded = [](float x) {
    const auto bits = bit_cast<std::uint32_t>(x);
    return x != x ? 0x7fffU : (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
  };
  return rounded(lo) | rounded(hi) << 16;
#endif
}

/// cvt.rn.f16x2.f32 (Data Movement): `lo` in bits 0..15, `hi` in bits 16..31, to nearest even; beyond 65520 infinity.
/// Below sm_80 one by one.
FOVEA_DEVICE std::uint32_t cvt_f16x2(float lo, float hi) {
  std::uint32_t r;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("{ .reg .b16 x, y; cvt.rn.f16.f32 x, %1; cvt.rn.f16.f32 y, %2; mov.b32 %0, {x, y}; }"
      : "=r"(r)
      : "f"(lo), "f"(hi));
#endif
  return r;
}

/// The bf16 of bits 0..15; exact.
FOVEA_DEVICE float f32_of_bf16_lo(std::uint32_t pair) { return bit_cast<float>(pair << 16); }

/// The bf16 of bits 16..31; exact.
FOVEA_DEVICE float f32_of_bf16_hi(std::uint32_t pair) {
  return bit_cast<float>(pair & 0xffff0000U);
}

/// cvt.f32.f16 (Data Movement) of bits 0..15; exact.
FOVEA_DEVICE float f32_of_f16_lo(std::uint32_t pair) {
  float y;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(y) : "r"(pair));
  return y;
}

/// cvt.f32.f16 (Data Movement) of bits 16..31; exact.
FOVEA_DEVICE float f32_of_f16_hi(std::uint32_t pair) {
  float y;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(y) : "r"(pair));
  return y;
}

/// cvt.rn.satfinite.e4m3x2.f32 (Data Movement; sm_89): `lo` in bits 0..7, `hi` in bits 8..15, to nearest even, at most
/// 448 of either sign; NaN is 0x7f.
FOVEA_DEVICE std::uint32_t cvt_e4m3x2(float lo, float hi) {
  std::uint32_t r;
  asm("{ .reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, %1, %2; cvt.u32.u16 %0, x; }"
      : "=r"(r)
      : "f"(hi), "f"(lo));
  return r;
}

/// cvt.rn.f16x2.e4m3x2 (Data Movement; sm_89) of bits 0..15: exact, NaN of either sign is NaN.
FOVEA_DEVICE std::uint32_t f16x2_of_e4m3x2_lo(std::uint32_t codes) {
  std::uint32_t r;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }"
      : "=r"(r)
      : "r"(codes));
  return r;
}

/// The same of bits 16..31.
FOVEA_DEVICE std::uint32_t f16x2_of_e4m3x2_hi(std::uint32_t codes) {
  std::uint32_t r;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi; }"
      : "=r"(r)
      : "r"(codes));
  return r;
}

/// cvt.rni.s32.f32 and cvt.pack.sat.u8 (Data Movement; sm_72): integers of 0 to 255, the first in bits 0..7, to nearest
/// even, NaN 0. ptxas makes two instructions of the six.
FOVEA_DEVICE std::uint32_t cvt_u8x4(float a, float b, float c, float d) {
  std::uint32_t r;
  asm("{ .reg .s32 x, y, z, w; .reg .b32 high; cvt.rni.s32.f32 x, %1; cvt.rni.s32.f32 y, %2;"
      " cvt.rni.s32.f32 z, %3; cvt.rni.s32.f32 w, %4; cvt.pack.sat.u8.s32.b32 high, w, z, 0;"
      " cvt.pack.sat.u8.s32.b32 %0, y, x, high; }"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

/// The same of -128 to 127.
FOVEA_DEVICE std::uint32_t cvt_s8x4(float a, float b, float c, float d) {
  std::uint32_t r;
  asm("{ .reg .s32 x, y, z, w; .reg .b32 high; cvt.rni.s32.f32 x, %1; cvt.rni.s32.f32 y, %2;"
      " cvt.rni.s32.f32 z, %3; cvt.rni.s32.f32 w, %4; cvt.pack.sat.s8.s32.b32 high, w, z, 0;"
      " cvt.pack.sat.s8.s32.b32 %0, y, x, high; }"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

/// cvt.rna.tf32.f32 (Data Movement): to 10 bits of fraction, ties away from zero; the low 13 bits are zero.
FOVEA_DEVICE std::uint32_t cvt_rna_tf32(float x) {
  std::uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

/// fma.rn.bf16x2 (Half Precision): a b + c of pairs, rounded once; denormals are numbers.
FOVEA_DEVICE std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

/// Products of bf16 pairs, rounded once: with -0, for mul.bf16x2 itself needs sm_90.
FOVEA_DEVICE std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  return fma_bf16x2(a, b, 0x80008000U);
}

/// lop3.b32 (Logic and Shift): a & b | c, which the compiler makes two instructions of where b and c are constants.
FOVEA_DEVICE std::uint32_t and_or(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/// prmt.b32 (Data Movement): byte i of the result is byte `selector >> 4 i & 7` of a (0 to 3) and b (4 to 7).
FOVEA_DEVICE std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  std::uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

/// add.rn.f16x2 (Half Precision).
FOVEA_DEVICE std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

/// mul.rn.f16x2 (Half Precision).
FOVEA_DEVICE std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

}  // namespace fovea::cuda::ptx
