// Arithmetic of two floats at once, in neighbouring registers: sm_100 and after. Lanes are worth as much as one by one,
// but a pair is one instruction to issue. Read math.cuh first: rounding and denormals are as there.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

/// fma.rn.ftz.f32x2 (Floating Point; sm_100): a b + c.
FOVEA_DEVICE F32x2 fma_rn_ftz_f32x2(F32x2 a, F32x2 b, F32x2 c) {
  F32x2 d;
  asm("{ .reg .b64 a, b, c, d; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5}; mov.b64 c, {%6, %7};"
      " fma.rn.ftz.f32x2 d, a, b, c; mov.b64 {%0, %1}, d; }"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
  return d;
}

/// add.rn.f32x2 (Floating Point; sm_100): denormals kept.
FOVEA_DEVICE F32x2 add_rn_f32x2(F32x2 a, F32x2 b) {
  F32x2 c;
  asm("{ .reg .b64 a, b, c; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5};"
      " add.rn.f32x2 c, a, b; mov.b64 {%0, %1}, c; }"
      : "=f"(c.x), "=f"(c.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return c;
}

/// mul.rn.f32x2 (Floating Point; sm_100): denormals kept.
FOVEA_DEVICE F32x2 mul_rn_f32x2(F32x2 a, F32x2 b) {
  F32x2 c;
  asm("{ .reg .b64 a, b, c; mov.b64 a, {%2, %3}; mov.b64 b, {%4, %5};"
      " mul.rn.f32x2 c, a, b; mov.b64 {%0, %1}, c; }"
      : "=f"(c.x), "=f"(c.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return c;
}

}  // namespace fovea::cuda::ptx
