// What common/merge_states takes at the launch: the states of rows, and where their union goes.
#pragma once

#include "shared/rows_param.h"
#include "shared/types.h"

namespace fovea::cuda {

/// A lane of a warp weighs one.
inline constexpr std::int32_t kMostMergedStates = 32;

/// out and lse of every row: of a part of the keys, or of the whole.
struct StateParam {
  RowsParam out;  // [batch, seqlen_q, num_heads, head_dim]
  float* lse;     // [batch, num_heads, seqlen_q]; of the whole it may be null
  std::int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
};

struct MergeParams {
  StateParam states[kMostMergedStates];
  StateParam merged;
  std::int32_t num_states;
  std::int32_t seqlen_q, num_heads, head_dim;
  std::int64_t num_rows;  // of all heads and sequences
};

}  // namespace fovea::cuda
