// The AMD twin of src/cuda/device/ptx/warp.cuh. Lanes that are switched off give 0 to a shuffle and to a vote: as
// there, all of a warp must be converged.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// ds_bpermute: takes four times the lane.
template <class T>
FOVEA_DEVICE T shfl_idx(const T& value, std::int32_t lane) {
  static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
  return bit_cast<T>(__builtin_amdgcn_ds_bpermute(4 * lane, bit_cast<std::int32_t>(value)));
}

template <class T>
FOVEA_DEVICE T shfl_bfly(const T& value, std::int32_t mask) {
  return shfl_idx(value, lane_idx() ^ mask);
}

FOVEA_DEVICE LaneMask ballot(bool is_true) {
#if __has_builtin(__builtin_amdgcn_ballot_w64)
  if constexpr (kWarpLanes == 64) {
    return __builtin_amdgcn_ballot_w64(is_true);
  } else {
    return __builtin_amdgcn_ballot_w32(is_true);
  }
#else
  constexpr int kNotEqual =
      33;  // LLVM's ICMP_NE: compilers of ROCm 5 know a comparison that gives its mask
  return static_cast<LaneMask>(__builtin_amdgcn_uicmp(is_true ? 1U : 0U, 0U, kNotEqual));
#endif
}

FOVEA_DEVICE bool vote_any(bool is_true) { return ballot(is_true) != 0; }
FOVEA_DEVICE bool vote_all(bool is_true) { return ballot(!is_true) == 0; }

/// Lanes go in step and LDS serves them in order: a fence for the compiler.
FOVEA_DEVICE void sync_warp() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

}  // namespace fovea::cuda::ptx
