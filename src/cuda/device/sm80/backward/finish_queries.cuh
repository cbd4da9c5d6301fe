// dq from the sums that sm80/attention_backward_one_walk has added up: scaled, rounded once, into a tensor of any
// strides. A CTA for each tile of tile_walked queries of a q head: reads 4 bytes an element, writes 2 or 4.
#pragma once

#include "common/backward_work.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "common/store_eight.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params_sm80.h"
#include "shared/staggered_walk.h"
#include "sm80/backward/query_sums.cuh"

namespace fovea::cuda::sm80 {

/// Which sums of a tile of queries there are.
struct SumsOfTile {
  bool has_first, has_round;

  template <Sm80BackwardSpec spec>
  FOVEA_DEVICE SumsOfTile of(const Sequence& s, std::int32_t begin) {
    if constexpr (!spec.is_staggered) return {!s.is_trailing, false};
    const std::int32_t idx = begin / spec.tile_walked;
    const std::int32_t num_key_tiles = ceil_div(s.seqlen_kv, spec.tile_owned);
    if (num_key_tiles == 0) return {false, false};
    return {has_first_sum(idx, num_key_tiles, ceil_div(s.seqlen_q, spec.tile_walked)),
            has_round_sum(idx)};
  }
};

/// The threads of the walk. One has a block of 8 columns of two rows at a time.
template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE void finish_queries(const Sm80OneWalkParams& p) {
  using Sums = QuerySums<spec>;
  constexpr int kThreads = 32 * spec.num_warps;
  const BackwardParams& b = p.common;
  const GradientParam& dq = b.dq;
  const OwnedTile tile = find_tile<spec.is_varlen, false>(b, ptx::block_idx().x, spec.tile_walked);
  if (tile.is_nothing) return;
  const Sequence& s = tile.sequence;
  const std::int64_t tile_at =
      (statistics_at<spec.is_varlen>(b.rows, s, tile.head) + tile.begin) * spec.head_dim_qk;
  const SumsOfTile parts = SumsOfTile::of<spec>(s, tile.begin);
  const bool is_aligned = has_aligned_rows(dq.tensor);
  float zero = 0;  // NaN where a sum is not finite
#pragma unroll 1
  for (int at = ptx::thread_idx().x; at < Sums::kTileFloats / 16; at += kThreads) {
    // Both blocks of a pair side by side: lanes write 32 bytes of a row together.
    const int row = at / 2 % 8;
    const int block = at / 16 % (Sums::kBlocks / 2) * 2 + at % 2;
    const int rows_at = at / (8 * Sums::kBlocks);
    const typename Sums::Place place{rows_at / Sums::kRowBlocks, rows_at % Sums::kRowBlocks, block};
    float sums[2][8]{};
    if (parts.has_first) Sums::gather(p.dq_sums + tile_at + place.at(), row, sums);
    if (spec.is_staggered && parts.has_round)
      Sums::gather(p.dq_round_sums + tile_at + place.at(), row, sums);
    const std::int32_t count = least(8, b.forward.head_dim_qk - place.column());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t q_idx = tile.begin + place.row() + half * 8 + row;
      if (q_idx >= s.seqlen_q || count <= 0) continue;
      if constexpr (spec.asks_redo) zero += zero_if_finite(sums[half]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[half][i] *= b.forward.softmax_scale;
      store_eight<spec.element>(
          dq,
          s.q_batch * dq.tensor.batch_stride + (s.q_row + q_idx) * dq.tensor.row_stride +
              tile.head * dq.tensor.head_stride + place.column() * dq.tensor.col_stride,
          is_aligned, count, sums[half]);
    }
  }
  if (spec.asks_redo && is_nan(zero)) ask_redo<spec.is_varlen, false>(b, s, tile.head, tile.begin);
}

}  // namespace fovea::cuda::sm80
