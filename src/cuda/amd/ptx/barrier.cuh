// The AMD twin of src/cuda/device/ptx/barrier.cuh: the one barrier of a workgroup; there are none by number.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// s_barrier orders no memory by itself: fences make the compiler wait for stores and copies before it.
FOVEA_DEVICE void sync_threads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

}  // namespace fovea::cuda::ptx
