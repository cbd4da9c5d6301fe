// Compiles the steps of codes.hpp for every target and hands out the tables.
#include "cpu/kernels/highway.hpp"  // first: it chooses the targets

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/code_kernels.cpp"
#include "hwy/foreach_target.h"
// then, per target:
#include "cpu/kernels/code_products-inl.hpp"
#include "cpu/kernels/round_probabilities-inl.hpp"

#if HWY_ONCE

namespace fovea::cpu {

const RoundingSteps& rounding_steps(CpuTarget f32_target) {
  switch (f32_target) {
#if HWY_TARGETS & HWY_AVX3
    case CpuTarget::avx512:
      return N_AVX3::rounding_steps();
#endif
#if HWY_TARGETS & HWY_AVX2
    case CpuTarget::avx2:
      return N_AVX2::rounding_steps();
#endif
    default:
      return HWY_STATIC_DISPATCH(rounding_steps());
  }
}

const CodeProducts* code_products_avx2() {
#if HWY_TARGETS & HWY_AVX2
  return &N_AVX2::code_products();
#else
  return nullptr;
#endif
}

const CodeProducts* code_products_avx512() {
#if HWY_TARGETS & HWY_AVX3
  return &N_AVX3::code_products();
#else
  return nullptr;
#endif
}

}  // namespace fovea::cpu
#endif
