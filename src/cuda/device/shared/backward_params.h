// What a backward kernel takes at the launch: the call in the past, its gradients, and what is known of each row.
// Strides are in elements; shapes stand beside their pointers.
#pragma once

#include "shared/backward_spec.h"
#include "shared/element.h"
#include "shared/forward_params.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// What common/backward_delta leaves of each row, for every kernel behind it:
///
///   P(q, kv) = 2^(score log2(e) - log_sum),  with has_origins 2^((score - origin) log2(e) - log_sum)
///   dS = P (dP - delta)
///
/// f32 [batch, num_heads_q, rows of a sequence], rows padded to kStatisticsRows: padding has log_sum +inf, so that P is
/// 0, and delta and origin 0. Packed: [num_heads_q, rows]; sequence i begins at row statistics_begin(cu_seqlens_q[i],
/// i). A row that sees neither key nor sink is as padding.
struct RowStatistics {
  float* log_sum;  // to base 2: of the whole row, sink included
  float* delta;    // rowsum(dout out) - dlse
  float* origin;   // null without has_origins
  std::int64_t batch_stride, head_stride;
};

/// Of packed statistics: every sequence begins at a multiple of the padding, behind the padding of the one before it.
constexpr std::int64_t statistics_begin(std::int64_t q_begin, std::int64_t sequence) {
  return (q_begin + sequence * kStatisticsRows) / kStatisticsRows * kStatisticsRows;
}

/// Words that stand for tiles of kStatisticsRows rows of a head of packed sequences: where those of a sequence begin,
/// and how many a head has, rows behind the last sequence included.
constexpr std::int64_t packed_tiles_begin(std::int64_t row_begin, std::int64_t sequence) {
  return statistics_begin(row_begin, sequence) / kStatisticsRows;
}
constexpr std::int64_t num_packed_tiles(std::int64_t num_rows, std::int64_t num_sequences) {
  return packed_tiles_begin(num_rows, num_sequences + 2);
}

/// Tiles of kStatisticsRows rows whose gradients a kernel found not finite, for a kernel behind it that computes these
/// tiles again (Sm80BackwardSpec::is_redo). Words are 0 where there is nothing to do; null where no kernel asks.
struct RedoTiles {
  std::int32_t* any;       // one word for all tiles
  std::int32_t* tiles;     // [head of a batch entry][tile], packed [head][num_packed_tiles]
  std::int32_t num_owned;  // tiles of the kernel that computes again, of all heads
};

/// A gradient as it is written; data null: not wanted.
struct GradientParam {
  BshdParam tensor;
  Element element;
  std::int32_t is_aligned;  // as q of ForwardParams
};

struct BackwardParams {
  /// The call whose gradient is wanted. out and lse are read; what it writes besides, and what splits keys or finds
  /// them in a cache, is not set.
  ForwardParams forward;

  BshdParam dout;  // [batch, seqlen_q, num_heads_q, head_dim_v]
  std::int32_t is_dout_aligned;
  const float* dlse;  // [batch, num_heads_q, seqlen_q], null: 0
  std::int64_t dlse_batch_stride, dlse_head_stride, dlse_row_stride;

  GradientParam dq;  // [batch, seqlen_q, num_heads_q, head_dim_qk]
  GradientParam dk;  // [batch, seqlen_kv, num_heads_kv, head_dim_qk]
  GradientParam dv;  // [batch, seqlen_kv, num_heads_kv, head_dim_v]
  float* dsinks;     // [num_heads_q], null: not wanted
  std::int64_t dsinks_stride;

  RowStatistics rows;
  RedoTiles redo_keys, redo_queries;
  /// lse above this, of either sign, is summed again (has_origins): rounded to f32, it would show in P.
  float largest_lse;

  // Dense: pairs (batch, head) whose walked rows share the L2 cache, for kernels that own keys and queries.
  std::int32_t kv_pairs_per_section, q_pairs_per_section;
};

/// What common/convert_gradient takes: f32 sums, rounded once into a tensor of any strides.
struct ConvertParams {
  const float* sums;  // [batch, rows, heads, width], strides below; packed as the tensor: batch 1
  std::int64_t batch_stride, row_stride, head_stride;
  GradientParam to;  // [batch, rows, heads, head_dim]
  float factor;
  std::int64_t num_rows;  // of all sequences
  std::int32_t rows_per_batch, num_heads, head_dim;
};

}  // namespace fovea::cuda
