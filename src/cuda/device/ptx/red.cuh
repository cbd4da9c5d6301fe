// Vector additions to global memory that return nothing (Synchronization: red; sm_90), relaxed at device scope: each
// element is atomic, the vector is not, and the order of additions is not fixed.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

/// red.global.add.v4.f32; `to` is a multiple of 16.
FOVEA_DEVICE void red_add_global_v4(float* to, const F32x4& value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

/// red.global.add.v2.f32; `to` is a multiple of 8.
FOVEA_DEVICE void red_add_global_v2(float* to, const F32x2& value) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x),
               "f"(value.y)
               : "memory");
}

/// red.global.add.noftz.v4.bf16x2: eight bf16; `to` is a multiple of 16.
FOVEA_DEVICE void red_add_global_v4_bf16x2(void* to, const U32x4& value) {
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace fovea::cuda::ptx
