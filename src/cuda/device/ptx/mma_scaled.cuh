// Products by one warp of numbers of four bits that share scales by groups, operands in registers (Warp Level Matrix),
// sm_120a. All lanes of the warp must be converged.
//
// An element is e2m1, eight in a register, the first in the low bits. Lane l holds, of a, rows l / 4 and l / 4 + 8 at
// k 8 (l % 4) to 8 (l % 4) + 7 and the same from k 32 on: registers as those of mma_m16n8k16; of b, column l / 4.
// Scales of a row are a register of one lane, byte g that of group g along k: of row r lane 4 r + 2 a_thread, of row
// r + 8 the lane behind it; of column n lane 4 n + b_thread. Registers of other lanes are not read.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// Four scales of e4m3 without sign, 16 numbers each; or two powers of two, 32 numbers each, in bytes 0 and 1.
enum class GroupScales : std::uint8_t { ue4m3_of_16, ue8m0_of_32 };

/// mma.m16n8k64.kind::mxf4nvf4.block_scale (Warp Level Matrix), sm_120a: d += (a · its scales) (b · its scales).
template <GroupScales scales, int a_thread, int b_thread>
FOVEA_DEVICE void mma_m16n8k64_e2m1(float (&d)[4], const std::uint32_t (&a)[4],
                                    const std::uint32_t (&b)[2], std::uint32_t a_scales,
                                    std::uint32_t b_scales) {
  static_assert(a_thread >= 0 && a_thread < 2, "scales of a are in two lanes of each four");
  static_assert(b_thread >= 0 && b_thread < 4, "scales of b are in one lane of each four");
  if constexpr (scales == GroupScales::ue4m3_of_16) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1."
        "f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, "
        "%12}, {%11}, {0, %13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales),
          "r"(b_scales), "n"(a_thread), "n"(b_thread));
  } else {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1."
        "f32.ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, "
        "%12}, {%11}, {0, %13};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scales),
          "r"(b_scales), "n"(a_thread), "n"(b_thread));
  }
}

/// cvt.rn.satfinite.e2m1x2.f32 (Data Movement; sm_100, sm_120a), four times: number i in bits 4 i to 4 i + 3, to
/// nearest even, at most 6 in magnitude, which NaN becomes. In one statement, so that each packs into what the one
/// before it left.
FOVEA_DEVICE std::uint32_t cvt_e2m1x8(const float (&x)[8]) {
  std::uint32_t r;
  asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; "
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3; cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; "
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
      : "=r"(r)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return r;
}

}  // namespace fovea::cuda::ptx
