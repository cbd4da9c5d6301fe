// What sm90/attention_backward and the kernels around it take at the launch.
#pragma once

#include "shared/backward_params.h"
#include "shared/backward_spec_sm90.h"
#include "shared/captured_params.h"
#include "shared/forward_params_sm90.h"
#include "shared/types.h"

namespace fovea::cuda {

/// What the kernel reads of rows, and where it sums dq, made from RowStatistics by prepare_rows. All have the rows of
/// the statistics, flat: row r of a head of a sequence is statistics_at + r.
struct Sm90BackwardRows {
  /// -log_sum, in each 16 rows in the order in which lanes read four at a time: of lane l of a quad rows 2 l, 2 l + 1,
  /// 2 l + 8, 2 l + 9.
  float* log_sum;
  /// kDeltaBytes: -delta as three numbers of the element's type (delta_pieces), then zeros. Where threads subtract it
  /// floats, in the order of log_sum.
  void* delta;
  /// [tile of tile_q rows][64 rows][64 columns][8][128 threads][4] fragments of the products that a tile is.
  float* dq_sums;
  /// The same of walks that have gone round (StaggeredWalk); null where they are not staggered.
  float* dq_round_sums;
  /// [tile_place of keys] How far a CTA has come with its sums of dq (turns.cuh), 0 at the launch, as are the words
  /// behind it, of sum_ends and RedoTiles.
  std::int32_t* progress;
  /// [q head of a batch entry][tile of queries] How many of a tile's two sums are complete, where that decides who
  /// writes dq (LastTiles). Null where walks are not staggered, or finish_queries writes dq.
  std::int32_t* sum_ends;
};

/// dS, rounded as products take it, of the tiles that CTAs have visited (stores_pairs).
struct PairTiles {
  void* tiles;            // [pair_tile_at][kPairPieces]
  std::int32_t* visited;  // [pair_tile_at] 0 where no CTA has been
};

/// Of a dense problem: tiles of queries of a tile of keys of a q head of a batch entry.
constexpr std::int64_t pair_tile_at(const ForwardParams& f, std::int32_t batch, std::int32_t q_head,
                                    std::int32_t key_tile, std::int32_t query_tile) {
  const std::int64_t key_tiles = (f.seqlen_kv + kSm90BackwardKeys - 1) / kSm90BackwardKeys;
  const std::int64_t query_tiles = (f.seqlen_q + kPairQueries - 1) / kPairQueries;
  return ((batch * std::int64_t{f.num_heads_q} + q_head) * key_tiles + key_tile) * query_tiles +
         query_tile;
}

struct Sm90BackwardParams {
  // Dimensions (head_dim, seqlen, head, batch), packed (head_dim, total, head, 1), 128-byte swizzle; boxes of 64
  // elements x tile_q rows (q, dout), 128 (k, v), 64 (dk, dv).
  TensorMapParam q, k, v, dout, dk, dv;
  BackwardParams common;
  Sm90BackwardRows rows;
  PairTiles pairs;
  // 0, which the compiler does not know: it keeps instructions in their order
  std::uint32_t zero;
};

/// Of prepare_rows: every row of the statistics.
struct PrepareRowsParams {
  RowStatistics from;
  Sm90BackwardRows to;
  std::int64_t num_rows;   // a multiple of kStatisticsRows
  std::int64_t num_words;  // of progress, sum_ends, RedoTiles and PairTiles
};

/// Of sum_pairs: a tile of the gradient of a dense bias from what stores_pairs left.
struct SumPairsParams {
  ForwardParams forward;
  PairTiles pairs;
  DenseGradient to;
  RedoTiles redo;  // tiles of captured_tiles
};

}  // namespace fovea::cuda
