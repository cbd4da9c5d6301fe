// Products by one warp, operands in registers (Warp Level Matrix), and the loads and stores of 8x8 matrices that feed
// them. All lanes of the warp must be converged. Which lane holds which element: tile/fragment.cuh.
#pragma once

#include "ptx/memory.cuh"
#include "shared/element.h"

namespace fovea::cuda::ptx {

/// ldmatrix.x4 (Warp Level Matrix): four 8x8 matrices of 16 bits; lane l gives the address, a multiple of 16, of row l
/// % 8 of matrix l / 8. Register i holds, of matrix i, elements (lane / 4, 2 (lane % 4)) and the one right of it.
FOVEA_DEVICE U32x4 ldmatrix_x4(SharedAddress row) {
  U32x4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(row)
               : "memory");
  return r;
}

/// ldmatrix.x4.trans: as ldmatrix_x4, of the transposed matrices.
FOVEA_DEVICE U32x4 ldmatrix_x4_trans(SharedAddress row) {
  U32x4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(row)
               : "memory");
  return r;
}

/// ldmatrix.x2: two matrices; the addresses of lanes 0..15 count, the others' must be valid.
FOVEA_DEVICE U32x2 ldmatrix_x2(SharedAddress row) {
  U32x2 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r.x), "=r"(r.y)
               : "r"(row)
               : "memory");
  return r;
}

/// ldmatrix.x2.trans: as ldmatrix_x2, of the transposed matrices.
FOVEA_DEVICE U32x2 ldmatrix_x2_trans(SharedAddress row) {
  U32x2 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r.x), "=r"(r.y)
               : "r"(row)
               : "memory");
  return r;
}

/// stmatrix.x4 (Warp Level Matrix), sm_90: the inverse of ldmatrix_x4.
FOVEA_DEVICE void stmatrix_x4(SharedAddress row, const U32x4& value) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// stmatrix.x4.trans, sm_90: the inverse of ldmatrix_x4_trans.
FOVEA_DEVICE void stmatrix_x4_trans(SharedAddress row, const U32x4& value) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

/// mma.m16n8k16 (Warp Level Matrix), bf16 or f16 inputs, f32 sums: d += a b.
template <Element element>
FOVEA_DEVICE void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  if constexpr (element == Element::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(element == Element::f16, "mma_m16n8k16 multiplies bf16 or f16");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// mma.m16n8k8 (Warp Level Matrix; sm_75), f16 inputs, f32 sums: d += a b. Its operands are the halves of those of
/// mma_m16n8k16: a0, a1 and b0 of the first eight of depth, a2, a3 and b1 of the others.
FOVEA_DEVICE void mma_m16n8k8_f16(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                  std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "
      "%2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}

/// mma.m16n8k32 (Warp Level Matrix), s8 inputs, sums in 32 bits, which wrap: d += a b. They are the bits of floats:
/// with d = 1.5 · 2^23 at first, that number and the sum.
FOVEA_DEVICE void mma_m16n8k32_s8(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                  std::uint32_t b1) {
  asm("{ .reg .b32 s<4>;\n"
      "mov.b32 s0, %0; mov.b32 s1, %1; mov.b32 s2, %2; mov.b32 s3, %3;\n"
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {s0, s1, s2, s3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {s0, s1, s2, s3};\n"
      "mov.b32 %0, s0; mov.b32 %1, s1; mov.b32 %2, s2; mov.b32 %3, s3; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// mma.m16n8k32 (Warp Level Matrix; sm_89), e4m3 inputs, f32 sums, of which tensor cores before sm_100 keep fewer bits:
/// d += a b.
FOVEA_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// mma.m16n8k8 (Warp Level Matrix), tf32 inputs (f32 words whose low 13 bits are not read; round them first with
/// cvt_rna_tf32).
FOVEA_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                   std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fovea::cuda::ptx
