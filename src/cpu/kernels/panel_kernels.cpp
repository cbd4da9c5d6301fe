// Compiles panel-inl.hpp for every target and hands out the tables.
#include "cpu/kernels/highway.hpp"  // first: it chooses the targets

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/panel_kernels.cpp"
#include "hwy/foreach_target.h"
// then, per target:
#include "cpu/kernels/panel-inl.hpp"

#if HWY_ONCE
#include "cpu/features.hpp"

namespace fovea::cpu {

const PanelKernels* panel_kernels(CpuTarget target) {
  switch (target) {
#if HWY_TARGETS & HWY_AVX3
    case CpuTarget::avx512:
    case CpuTarget::avx512_vnni:  // for what is not multiplied as codes
      return &N_AVX3::f32_panel_kernels();
    case CpuTarget::avx512_bf16:
      return panel_kernels_avx512_bf16();
    case CpuTarget::amx_bf16:
      return panel_kernels_amx_bf16();
#endif
#if HWY_TARGETS & HWY_AVX2
    case CpuTarget::avx2:
    case CpuTarget::avx_vnni:
      return &N_AVX2::f32_panel_kernels();
#endif
#if HWY_TARGETS & HWY_NEON
    case CpuTarget::neon:
      return &N_NEON::f32_panel_kernels();
#else
    case CpuTarget::scalar:
      return &HWY_NAMESPACE::f32_panel_kernels();
#endif
    default:
      return nullptr;
  }
}

const PanelKernels& best_f32_kernels() {
  const CpuTarget best = best_f32_target();
  if (const PanelKernels* kernels = panel_kernels(best)) return *kernels;
  // A build may lack what its compiler did not know.
  const PanelKernels* avx2 = best == CpuTarget::avx512 ? panel_kernels(CpuTarget::avx2) : nullptr;
  return avx2 != nullptr ? *avx2 : *panel_kernels(CpuTarget::scalar);
}

}  // namespace fovea::cpu
#endif
