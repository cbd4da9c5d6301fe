// Zeros ahead of sm80/attention_backward_one_walk: for what it adds to, and for the words by which tiles are named that
// are to be computed again.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params_sm80.h"
#include "shared/backward_spec.h"

namespace fovea::cuda::sm80 {

/// The threads of the walk.
template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE void clear_sums(const ClearSumsParams& p) {
  constexpr int kThreads = 32 * spec.num_warps;
  const std::int64_t first =
      std::int64_t{ptx::block_idx().x} * kThreads * kClearedVectors + ptx::thread_idx().x;
#pragma unroll
  for (int i = 0; i < kClearedVectors; ++i) {
    const std::int64_t at = first + i * kThreads;
    if (at < p.count) ptx::st_global(static_cast<ptx::U32x4*>(p.to) + at, ptx::U32x4{});
  }
}

}  // namespace fovea::cuda::sm80
