// The AMD twin of src/cuda/device/ptx/barrier.cuh: the one barrier of a workgroup; there are none by number.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// What the thread has stored so far, others see behind a barrier that it comes to next: the compiler waits for
/// stores to LDS (lgkmcnt). That LLVM 22 waits for copies to LDS as well is no promise (copy_to_shared.cuh).
FOVEA_DEVICE void fence_release_workgroup() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
}

/// What others had released before the barrier that the thread comes from, it sees.
FOVEA_DEVICE void fence_acquire_workgroup() {
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

/// s_barrier: waits for all waves of the workgroup, and orders no memory by itself.
FOVEA_DEVICE void barrier_alone() { __builtin_amdgcn_s_barrier(); }

FOVEA_DEVICE void sync_threads() {
  fence_release_workgroup();
  barrier_alone();
  fence_acquire_workgroup();
}

}  // namespace fovea::cuda::ptx
