// Named barriers of a CTA: 16, of which sync_threads takes number 0. Barriers in shared memory are in mbarrier.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// bar.sync 0 (Synchronization): every thread of the CTA that has not exited.
FOVEA_DEVICE void sync_threads() { asm volatile("bar.sync 0;" ::: "memory"); }

/// bar.sync id, threads (Synchronization): waits until `threads` threads, a multiple of 32, have come by sync or
/// arrive. Warps must be converged. Keep `id` a constant: from a register, ptxas reserves all 16 barriers.
FOVEA_DEVICE void bar_sync(std::int32_t id, std::int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// bar.arrive id, threads (Synchronization): comes, does not wait; counts and convergence as for bar_sync.
FOVEA_DEVICE void bar_arrive(std::int32_t id, std::int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace fovea::cuda::ptx
