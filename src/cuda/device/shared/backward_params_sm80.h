// What sm80/attention_backward_one_walk and the kernels around it take at the launch.
#pragma once

#include "shared/backward_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct Sm80OneWalkParams {
  BackwardParams common;
  /// f32 sums of dq, unscaled; tiles of the rows of the statistics, flat: row r of a head of a sequence is
  /// statistics_at + r. Of a tile [warp][fragment] (QuerySums). 0 at the launch, but of staggered walks.
  float* dq_sums;
  /// The same of walks that have gone round (StaggeredWalk); null where they are not staggered.
  float* dq_round_sums;
  /// [tile_place of keys] How far a walk has come (WalkProgress), 0 at the launch. Null where there are no turns.
  std::int32_t* progress;
};

/// Of sm80/backward/clear_sums: `count` times 16 bytes, which become 0.
struct ClearSumsParams {
  void* to;
  std::int64_t count;
};

/// 16 bytes so many times of each thread of clear_sums.
inline constexpr std::int32_t kClearedVectors = 8;

}  // namespace fovea::cuda
