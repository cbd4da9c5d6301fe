// What sm90/attention_backward is compiled for, and where things lie in its shared memory. Read backward_params_sm90.h
// next.
#pragma once

#include "shared/backward_params.h"
#include "shared/backward_spec.h"
#include "shared/staggered_walk.h"
#include "shared/types.h"

namespace fovea::cuda {

/// sm90/attention_backward.
struct Sm90BackwardSpec : BackwardSpec {
  std::int32_t tile_q = 64;      // rows of queries at a time
  std::int32_t stages = 3;       // such tiles in shared memory
  bool is_deterministic = true;  // dq is summed in the order of keys, by turns
  bool writes_elements = false;  // of dk and dv, one by one: what TMA cannot write
  bool hides_keys = false;       // rows do not see all keys of a tile
  // Gradients that are not finite are named by tiles (RedoTiles). NaN and infinity in what is hidden or dropped meet
  // weights of 0; and rows that has_origins gives an origin are NaN from the start (prepare_rows).
  bool asks_redo = false;
  // For what programs load for each score, and for weights of gradients that are not P: fewer queries, or dv before dP.
  bool spares_registers = false;
  bool is_staggered = false;  // walks begin at tiles of queries of their own (StaggeredWalk)
  // By turns: the first sum of a tile of queries is stored, and the CTA that adds the last one writes dq (LastTiles).
  // Else prepare_rows leaves zeros, and finish_queries writes dq.
  bool finishes_queries = false;
  // Threads subtract deltas, which are floats then; else products do, from three 16-bit numbers each. As with dropout.
  bool subtracts_deltas = false;
  // dS of each visited tile goes to memory (PairTiles): where it is the gradient of a dense bias.
  bool stores_pairs = false;

  bool operator==(const Sm90BackwardSpec&) const = default;
};

/// Keys of a CTA of sm90/attention_backward: 64 for each of two groups.
inline constexpr std::int32_t kSm90BackwardKeys = 128;
static_assert(kSm90BackwardKeys == kStatisticsRows,
              "tiles of keys are counted as rows of statistics are");

/// Tiles of queries whose words are posted, turns that are announced: more than roles are ever apart.
inline constexpr std::int32_t kSm90BackwardWords = 8;
inline constexpr std::int32_t kSm90BackwardTurns = 4;
/// What a row's delta is to the tensor cores: 8 elements of 16 bits.
inline constexpr std::int32_t kDeltaBytes = 16;
/// And where they do not subtract it a float: dP of a dropped pair is 0, less its row's delta.
constexpr std::int32_t delta_bytes(const Sm90BackwardSpec& spec) {
  return spec.has_dropout || spec.subtracts_deltas ? 4 : kDeltaBytes;
}

/// Warps of prepare_rows and finish_queries; what the latter takes of shared memory.
inline constexpr std::int32_t kSm90RowWarps = 8;
constexpr std::int32_t sm90_finish_bytes(const Sm90BackwardSpec& spec) {
  return 4 * spec.tile_q * (spec.head_dim_qk + 4);
}

/// Queries of a tile of pairs, beside the keys of a CTA: stores_pairs goes with spares_registers. Its dS is pieces of
/// 16 bytes, the operands of dk: [group of 64 keys][warp][16 queries][lane].
inline constexpr std::int32_t kPairQueries = 64;
inline constexpr std::int32_t kPairPieces = kPairQueries * kSm90BackwardKeys * 2 / 16;

/// Shared memory of sm90/sum_pairs: floats of a tile, four more to a row of keys.
inline constexpr std::int32_t kSumPairsPitch = kSm90BackwardKeys + 4;
inline constexpr std::int32_t kSumPairsBytes = 4 * kPairQueries * kSumPairsPitch;

/// Shared memory of sm90/attention_backward: where each member begins, in bytes from the start of the CTA's.
struct Sm90BackwardLayout {
  std::int32_t k, v;                            // later dv lies where v did
  std::int32_t q, dout;                         // [stage]; later dk lies where q did
  std::int32_t ds;                              // [2] transposed: rows of keys
  std::int32_t delta;                           // [stage] delta_bytes of each row
  std::int32_t zeros;                           // kDeltaBytes of each row
  std::int32_t log_sum;                         // [stage] a float of each row
  std::int32_t k_full, v_full;                  // barriers of 8 bytes, as all up to passed
  std::int32_t q_full, dout_full, stage_empty;  // [stage]
  std::int32_t ds_full, ds_empty;               // [2]
  std::int32_t turn, added, passed;             // [kSm90BackwardTurns]
  std::int32_t words;                           // [kSm90BackwardWords] posted tiles of queries
  std::int32_t num_watched;  // tiles of lower keys that may not have ended (turns.cuh)
  std::int32_t last_tiles;   // [2] a bit for each of 32 tiles of queries (LastTiles)
  std::int32_t work;         // the owned tile
  std::int32_t bytes;
};

constexpr Sm90BackwardLayout sm90_backward_layout(const Sm90BackwardSpec& spec) {
  const std::int32_t bytes = element_bytes(spec.element);
  std::int32_t end = 0;
  const auto take = [&end](std::int32_t size) { return (end += size) - size; };
  Sm90BackwardLayout at{};
  at.k = take(kSm90BackwardKeys * bytes * spec.head_dim_qk);
  at.v = take(kSm90BackwardKeys * bytes * spec.head_dim_v);
  at.q = take(spec.stages * spec.tile_q * bytes * spec.head_dim_qk);
  at.dout = take(spec.stages * spec.tile_q * bytes * spec.head_dim_v);
  at.ds = take(2 * kSm90BackwardKeys * bytes * spec.tile_q);
  at.delta = take(spec.stages * spec.tile_q * delta_bytes(spec));
  at.zeros = take(spec.tile_q * kDeltaBytes);
  at.log_sum = take(spec.stages * spec.tile_q * 4);
  at.k_full = take(8);
  at.v_full = take(8);
  at.q_full = take(8 * spec.stages);
  at.dout_full = take(8 * spec.stages);
  at.stage_empty = take(8 * spec.stages);
  at.ds_full = take(8 * 2);
  at.ds_empty = take(8 * 2);
  at.turn = take(8 * kSm90BackwardTurns);
  at.added = take(8 * kSm90BackwardTurns);
  at.passed = take(8 * kSm90BackwardTurns);
  at.words = take(8 * kSm90BackwardWords);
  at.num_watched = take(4);
  at.last_tiles = take(4 * 2);
  end = (end + 15) / 16 * 16;
  at.work = take(16 * 2);
  at.bytes = end;
  return at;
}

}  // namespace fovea::cuda
