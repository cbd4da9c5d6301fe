// Zeroes the words by which tiles are named that are to be computed again, ahead of sm90/attention_backward_wide.
#pragma once

#include "ptx/base.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params_sm90_wide.h"
#include "shared/backward_spec_sm90_wide.h"

namespace fovea::cuda::sm90 {

/// kClearThreads threads, kClearedWords words each.
template <Sm90WideBackwardSpec spec, class Mods>
FOVEA_DEVICE void clear_words(const ClearWordsParams& p) {
  ptx::griddepcontrol_launch_dependents();
  const std::int64_t first =
      std::int64_t{ptx::block_idx().x} * kClearThreads * kClearedWords + ptx::thread_idx().x;
#pragma unroll
  for (int i = 0; i < kClearedWords; ++i) {
    const std::int64_t at = first + i * kClearThreads;
    if (at < p.count) ptx::st_global(p.words + at, std::int32_t{0});
  }
  ptx::griddepcontrol_wait();  // for who knows the rows, on behalf of the kernel behind this one
}

}  // namespace fovea::cuda::sm90
