// What shapes the code of a backward kernel. Each kernel has a spec of its own, which says what BackwardSpec does and
// more. Read backward_params.h next.
#pragma once

#include "shared/element.h"
#include "shared/instructions.h"
#include "shared/types.h"

namespace fovea::cuda {

/// What every backward kernel is compiled for. Lengths, contents, addresses, strides, scalars, sinks and what
/// gradients are made of are parameters (backward_params.h): none of them compiles anything.
struct BackwardSpec {
  Element element = Element::bf16;       // of q, k, v
  Element dout_element = Element::bf16;  // of dout
  std::int32_t head_dim_qk = 128;        // as tiles hold it: the problem's, padded
  std::int32_t head_dim_v = 128;
  std::int32_t num_warps = 8;
  std::int32_t ctas_per_sm = 1;  // that registers are left for
  bool is_varlen = false;
  bool has_padded_head_dim = false;  // the problem's head dims are below the tile's
  // Scores are scaled one by one and taken less their row's origin (RowStatistics): for programs, and where all of f32
  // is wanted.
  bool has_origins = false;
  bool has_dropout = false;
  bool reads_dropout_seed = false;  // has_dropout, and its key is mixed from memory of the device
  bool has_dropout_places = false;  // has_dropout, of a part of the whole that is drawn for

  bool operator==(const BackwardSpec&) const = default;
};

/// A kernel that owns rows of one side and walks over tiles of the other: keys, for dk and dv, or queries, for dq.
/// What it owns stays in shared memory and its sums in registers; nothing is added to memory.
struct OwnerSpec : BackwardSpec {
  bool owns_keys = true;
  bool sums_scores = true;   // dk or dq: gradients of scores times the other side's rows
  bool sums_values = false;  // dv: probabilities times dout
  std::int32_t tile_owned = 64;
  std::int32_t tile_walked = 64;  // rows of the other side at a time
  std::int32_t stages = 1;        // such tiles in shared memory
  Instructions instructions = Instructions::sm80;

  bool operator==(const OwnerSpec&) const = default;
};

/// sm80/attention_backward, and sm80/attention_backward_one_walk.
struct Sm80BackwardSpec : OwnerSpec {
  bool is_redo = false;  // of the tiles alone that another kernel found not finite (RedoTiles)
  // Warps side by side along the walked rows; those of a column share owned rows. Above 1 (one walk) a warp has its
  // columns of both sums, and P and dS of the others through shared memory.
  std::int32_t column_warps = 1;
  // Of one walk: sums of dq in the order of keys, by turns; and walks that begin at tiles of queries of their own
  // (StaggeredWalk).
  bool takes_turns = false, is_staggered = false;
  // Of one walk: gradients that are not finite are named by tiles (RedoTiles). NaN and infinity in what is hidden or
  // dropped meet weights of 0.
  bool asks_redo = false;

  /// dq, too, by owners of keys.
  constexpr bool is_one_walk() const { return column_warps > 1; }

  bool operator==(const Sm80BackwardSpec&) const = default;
};

/// sm80/attention_backward_f32.
struct PlainBackwardSpec : OwnerSpec {
  bool operator==(const PlainBackwardSpec&) const = default;
};

/// common/backward_delta.
struct DeltaSpec {
  Element element = Element::bf16;  // of q and k
  Element out_element = Element::bf16;
  Element dout_element = Element::bf16;
  bool is_varlen = false;
  bool has_origins = false;     // as BackwardSpec
  bool has_dependents = false;  // the kernel behind it starts while it ends, and waits by itself

  bool operator==(const DeltaSpec&) const = default;
};

/// Rows of a CTA of common/backward_delta, and what RowStatistics are padded to.
inline constexpr std::int32_t kStatisticsRows = 128;

/// Threads of the kernels that all backward kernels share.
inline constexpr std::int32_t kDeltaThreads = 256;
inline constexpr std::int32_t kSinkThreads = 256;
inline constexpr std::int32_t kConvertThreads = 256;

/// Statistics of a tile of rows in shared memory: log_sum, delta, and origin where there is one.
constexpr std::int32_t sm80_statistics_bytes(const Sm80BackwardSpec& spec) {
  return spec.owns_keys ? (spec.has_origins ? 3 : 2) * 4 * spec.tile_walked : 0;
}

/// P and dS of a tile, where warps pass them on.
constexpr std::int32_t sm80_pairs_bytes(const Sm80BackwardSpec& spec) {
  return !spec.is_one_walk() ? 0
                             : 2 * element_bytes(spec.element) * spec.tile_owned * spec.tile_walked;
}

/// Warps side by side along the columns of a tile's dq, in one walk; the others along its rows. Tiles that are square
/// or wide are read least by four.
constexpr std::int32_t sm80_query_column_warps(const Sm80BackwardSpec& spec) {
  constexpr std::int32_t kColumnsOfWarp = 16;
  return spec.head_dim_qk % (4 * kColumnsOfWarp) == 0 && spec.tile_walked <= spec.head_dim_qk ? 4
                                                                                              : 2;
}

/// Of sm80/attention_backward: q and dout, or k and v, of the owned rows, the second where scores have gradients;
/// stages of the walked ones; P and dS; a word of each warp.
constexpr std::int32_t sm80_backward_shared_bytes(const Sm80BackwardSpec& spec) {
  const std::int32_t owned = element_bytes(spec.element) * spec.tile_owned *
                             (spec.head_dim_qk + (spec.sums_scores ? spec.head_dim_v : 0));
  const std::int32_t stage =
      element_bytes(spec.element) * spec.tile_walked * (spec.head_dim_qk + spec.head_dim_v) +
      sm80_statistics_bytes(spec);
  return owned + spec.stages * stage + sm80_pairs_bytes(spec) + 4 * spec.num_warps;
}

/// Dynamic shared memory of sm80/attention_backward_f32: f32 rows of both tensors of both sides, P and dS, each a word
/// longer than a multiple of 32 words; what is known of the walked, or owned, rows.
constexpr std::int32_t plain_backward_shared_bytes(const PlainBackwardSpec& spec) {
  const std::int32_t rows = spec.tile_owned + spec.tile_walked;
  const std::int32_t queries = spec.owns_keys ? spec.tile_walked : spec.tile_owned;
  return 4 * (rows * (spec.head_dim_qk + 1) + rows * (spec.head_dim_v + 1) +
              2 * spec.tile_owned * (spec.tile_walked + 1) + 3 * queries);
}

}  // namespace fovea::cuda
