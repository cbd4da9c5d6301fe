// Compiles gradient-inl.hpp for every target and hands out the tables.
#include "cpu/kernels/highway.hpp"  // first: it chooses the targets

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/gradient_kernels.cpp"
#include "hwy/foreach_target.h"
// then, per target:
#include "cpu/kernels/gradient-inl.hpp"

#if HWY_ONCE
namespace fovea::cpu {

const GradientKernels* gradient_kernels(CpuTarget target) {
  switch (target) {
#if HWY_TARGETS & HWY_AVX3
    case CpuTarget::avx512:
      return &N_AVX3::f32_gradient_kernels();
    case CpuTarget::avx512_bf16:
      return gradient_kernels_avx512_bf16();
    case CpuTarget::amx_bf16:
      return gradient_kernels_amx_bf16();
#endif
#if HWY_TARGETS & HWY_AVX2
    case CpuTarget::avx2:
      return &N_AVX2::f32_gradient_kernels();
#endif
#if HWY_TARGETS & HWY_NEON
    case CpuTarget::neon:
      return &N_NEON::f32_gradient_kernels();
#else
    case CpuTarget::scalar:
      return &HWY_NAMESPACE::f32_gradient_kernels();
#endif
    default:
      return nullptr;
  }
}

const PanelKernels* gradient_panel_kernels(CpuTarget target) {
#if HWY_TARGETS & HWY_AVX3
  if (target == CpuTarget::avx512_bf16) return gradient_panel_kernels_avx512_bf16();
  if (target == CpuTarget::amx_bf16) return gradient_panel_kernels_amx_bf16();
#endif
  return panel_kernels(target);
}

}  // namespace fovea::cpu
#endif
