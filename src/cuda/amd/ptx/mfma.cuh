// v_mfma of CDNA: the 64 lanes of a wave multiply two small matrices and add to a third, D += A B. Elements of 16 bits,
// sums in f32.
//
// Which lane holds what of 32 x 32 x K, lane l, h = l / 32 (AMD's matrix instruction calculator prints it):
//
//   A   row l % 32       depth K / 2 h + e, e = 0 .. K / 2 - 1      2 elements to a register
//   B   column l % 32    the same
//   D   column l % 32    register g: row 8 (g / 4) + 4 h + g % 4
//
// A sum may go over depths in any order that A and B share. So 8 elements of a lane are one product of depth 16, or two
// of depth 8, the first four of each lane and the last four: whoever loads them need not know which.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

/// Of D.
inline constexpr int kMfmaSums = 16;

using MfmaSums = float __attribute__((vector_size(64)));
using Mfma4Bf16 = short __attribute__((vector_size(8)));
using Mfma4F16 = _Float16 __attribute__((vector_size(8)));

/// v_mfma_f32_32x32x8: gfx90a, gfx942, gfx950.
template <Element element>
FOVEA_DEVICE void mfma_32x32x8(float (&d)[kMfmaSums], const U32x2& a, const U32x2& b) {
  static_assert(element != Element::f32, "mfma_32x32x8 multiplies bf16 or f16");
  auto sums = bit_cast<MfmaSums>(d);
  if constexpr (element == Element::bf16) {
    sums = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(bit_cast<Mfma4Bf16>(a), bit_cast<Mfma4Bf16>(b),
                                                    sums, 0, 0, 0);
  } else {
    sums = __builtin_amdgcn_mfma_f32_32x32x8f16(bit_cast<Mfma4F16>(a), bit_cast<Mfma4F16>(b), sums,
                                                0, 0, 0);
  }
#pragma unroll
  for (int g = 0; g < kMfmaSums; ++g) d[g] = sums[g];
}

#if defined(__gfx950__)
using Mfma8Bf16 = __bf16 __attribute__((vector_size(16)));
using Mfma8F16 = _Float16 __attribute__((vector_size(16)));
#endif

/// v_mfma_f32_32x32x16: gfx950 alone.
template <Element element>
FOVEA_DEVICE void mfma_32x32x16(float (&d)[kMfmaSums], const U32x4& a, const U32x4& b) {
  static_assert(element != Element::f32, "mfma_32x32x16 multiplies bf16 or f16");
#if defined(__gfx950__)
  auto sums = bit_cast<MfmaSums>(d);
  if constexpr (element == Element::bf16) {
    sums = __builtin_amdgcn_mfma_f32_32x32x16_bf16(bit_cast<Mfma8Bf16>(a), bit_cast<Mfma8Bf16>(b),
                                                   sums, 0, 0, 0);
  } else {
    sums = __builtin_amdgcn_mfma_f32_32x32x16_f16(bit_cast<Mfma8F16>(a), bit_cast<Mfma8F16>(b),
                                                  sums, 0, 0, 0);
  }
#pragma unroll
  for (int g = 0; g < kMfmaSums; ++g) d[g] = sums[g];
#else
  static_assert(element == Element::f32, "there is no mfma of depth 16 before gfx950");
#endif
}

}  // namespace fovea::cuda::ptx
