// The AMD twin of src/cuda/device/ptx/math.cuh. Errors are those of the ISA documents: v_exp_f32, v_log_f32 and
// v_rcp_f32 are within 1 ulp and take denormals for zero; all else keeps denormals, with .ftz in the name or without.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

// ---- approximations ----------------------------------------------------------------------------

// The compilers of ROCm 5 and 6.0 know the two instructions by other names.
FOVEA_DEVICE float ex2_approx_ftz(float x) {
#if __has_builtin(__builtin_amdgcn_exp2f)
  return __builtin_amdgcn_exp2f(x);
#else
  return __builtin_exp2f(x);
#endif
}

FOVEA_DEVICE float lg2_approx_ftz(float x) {
#if __has_builtin(__builtin_amdgcn_logf)
  return __builtin_amdgcn_logf(x);
#else
  return __builtin_log2f(x);
#endif
}

FOVEA_DEVICE float rcp_approx_ftz(float x) { return __builtin_amdgcn_rcpf(x); }

// ---- rounded once ------------------------------------------------------------------------------

FOVEA_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FOVEA_DEVICE float fma_rn_ftz(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

FOVEA_DEVICE float add_rn(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}

FOVEA_DEVICE float mul_rn(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}

FOVEA_DEVICE float div_rn(float a, float b) { return a / b; }
FOVEA_DEVICE float sqrt_rn(float x) { return __builtin_sqrtf(x); }
FOVEA_DEVICE float cvt_rni(float x) { return __builtin_rintf(x); }

/// A NaN operand gives way to the other one.
FOVEA_DEVICE float max_ftz(float a, float b) { return __builtin_fmaxf(a, b); }
FOVEA_DEVICE float min_ftz(float a, float b) { return __builtin_fminf(a, b); }

FOVEA_DEVICE float abs(float x) { return __builtin_fabsf(x); }
FOVEA_DEVICE float abs_ftz(float x) { return __builtin_fabsf(x); }

FOVEA_DEVICE float max_nan(float a, float b) { return a != a ? a : b != b ? b : max_ftz(a, b); }

// ---- bits ------------------------------------------------------------------------------------------

/// v_perm_b32: byte i of the result is byte (selector >> 8 i) of lo, 0 to 3, or of hi, 4 to 7. (LLVM finds the
/// instruction for few of the expressions that mean it.)
FOVEA_DEVICE std::uint32_t byte_perm(std::uint32_t lo, std::uint32_t hi, std::uint32_t selector) {
  return __builtin_amdgcn_perm(hi, lo, selector);
}

// ---- widths ------------------------------------------------------------------------------------

#if defined(__gfx950__)
FOVEA_DEVICE std::uint32_t cvt_bf16x2(float lo, float hi) {
  using Pair = __bf16 __attribute__((vector_size(4)));
  return bit_cast<std::uint32_t>(Pair{static_cast<__bf16>(lo), static_cast<__bf16>(hi)});
}
#else
/// To nearest even by integers: instructions for it are gfx950's alone.
FOVEA_DEVICE std::uint32_t cvt_bf16x2(float lo, float hi) {
  const auto rounded = [](float x) {
    const auto bits = bit_cast<std::uint32_t>(x);
    return x != x ? 0x7fffU : (bits + 0x7fffU + (bits >> 16U & 1U)) >> 16U;
  };
  return rounded(lo) | rounded(hi) << 16U;
}
#endif

FOVEA_DEVICE std::uint32_t cvt_f16x2(float lo, float hi) {
  using Pair = _Float16 __attribute__((vector_size(4)));
  return bit_cast<std::uint32_t>(Pair{static_cast<_Float16>(lo), static_cast<_Float16>(hi)});
}

FOVEA_DEVICE float f32_of_bf16_lo(std::uint32_t pair) { return bit_cast<float>(pair << 16U); }
FOVEA_DEVICE float f32_of_bf16_hi(std::uint32_t pair) {
  return bit_cast<float>(pair & 0xffff0000U);
}

FOVEA_DEVICE float f32_of_f16_lo(std::uint32_t pair) {
  return static_cast<float>(bit_cast<_Float16>(static_cast<std::uint16_t>(pair)));
}
FOVEA_DEVICE float f32_of_f16_hi(std::uint32_t pair) { return f32_of_f16_lo(pair >> 16U); }

}  // namespace fovea::cuda::ptx
