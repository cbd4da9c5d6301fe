// The second kernel of a split problem, which joins partial states: its spec, and what it takes at the launch.
#pragma once

#include "shared/element.h"
#include "shared/split.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

struct CombineSpec {
  Element out_element = Element::bf16;
  bool wants_row_max = false;
  bool is_chained = false;    // it starts beside the kernel before it, and waits
  bool has_packed_q = false;  // as the kernel's before it
  std::int32_t most_splits = kMostSplits;
  bool has_groups = false;    // splits are joined by groups (split.h)
  bool takes_groups = false;  // who computed them may have taken groups, or all of a sequence

  bool operator==(const CombineSpec&) const = default;
};

/// A warp for each row.
struct CombineParams {
  BshdParam out;  // [batch, seqlen_q, num_heads_q, head_dim_v], or packed; written
  float* lse;
  float* row_max;
  std::int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  std::int64_t row_max_batch_stride, row_max_head_stride, row_max_row_stride;
  const float* sinks;
  std::int64_t sinks_stride;
  IndexParam seqlens_kv, left_padding, page_indptr;  // as ForwardParams
  IndexParam cu_seqlens_q, cu_seqlens_new;
  std::int64_t total_q, total_new;
  std::int32_t num_listed, page_size, capacity, num_new;
  const float* partial_out;  // [batch, num_heads_q, seqlen_q, max_splits, partial_width]
  const float* partial_lse;
  const float* partial_max;
  std::int32_t max_splits, partial_width;
  std::int32_t seqlen_q, seqlen_kv, num_heads_q, head_dim_v;
  std::int64_t num_rows;
  // has_groups: what says of which units partial states are (common/key_share.cuh)
  std::int32_t num_sequences;
  float tiles_of_cta;
};

}  // namespace fovea::cuda
