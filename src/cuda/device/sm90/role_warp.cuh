// What Hopper's kernels share whose warps have roles: a warp among the barriers of its CTA, and tensor maps as TMA
// takes them.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_sm90.h"

namespace fovea::cuda::sm90 {

using ptx::SharedAddress;

FOVEA_DEVICE const ptx::TensorMap* tensor_map(const TensorMapParam& map) {
  return reinterpret_cast<const ptx::TensorMap*>(&map);
}

/// A warp, and the shared memory of its CTA.
struct RoleWarp {
  SharedAddress smem;
  int warp, lane;

  /// The i-th of those that begin at byte `kind`.
  FOVEA_DEVICE_MEMBER SharedAddress barrier(int kind, int i) const { return smem + kind + 8 * i; }

  /// A word that all lanes read: by shuffle, so that the compiler knows it as uniform.
  FOVEA_DEVICE_MEMBER std::uint32_t word_at(SharedAddress at) const {
    return ptx::shfl_idx(ptx::ld_shared<std::uint32_t>(at), 0);
  }

  /// For a warp whose leader goes on alone: none of its lanes may still wait when the leader opens the next phase.
  FOVEA_DEVICE_MEMBER void await(SharedAddress barrier, std::uint32_t parity) const {
    ptx::mbarrier_wait_parity(barrier, parity);
    ptx::sync_warp();
  }

  /// This warp is done with what the barrier guards.
  FOVEA_DEVICE_MEMBER void release(SharedAddress barrier) const {
    ptx::sync_warp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
};

}  // namespace fovea::cuda::sm90
