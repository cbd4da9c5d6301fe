// Which Highway targets we compile: one portable baseline, AVX2, AVX-512, NEON. Include before anything of Highway, in
// every file that uses it: all translation units must agree.
#pragma once

// What lies between these is superseded by a better one or adds nothing that our loops use; bf16 products have kernels
// of their own (panel_avx512_bf16.cpp, panel_amx_bf16.cpp).
#define HWY_DISABLED_TARGETS                                                                 \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | FOVEA_HWY_AVX3_ZEN4 | FOVEA_HWY_AVX3_SPR | HWY_SVE | \
   HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

// The portable baseline is HWY_SCALAR, one lane, with every compiler. With clang, and with GCC from 12.3 on, Highway
// would take emulated vectors of 128 bits instead, whose Min and Max lose NaN and whose conversion to f16 truncates.
#define HWY_BROKEN_EMU128 1

// Names that appeared after the Highway of Debian 12; Highway fixes the bits for good.
#define FOVEA_HWY_AVX3_ZEN4 (1LL << 6)
#define FOVEA_HWY_AVX3_SPR (1LL << 4)
