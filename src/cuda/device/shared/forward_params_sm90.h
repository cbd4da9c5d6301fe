// What the kernels of Hopper take at the launch, beside what every forward kernel does.
#pragma once

#include "shared/forward_params.h"
#include "shared/quantize_k.h"
#include "shared/quantize_v.h"
#include "shared/tensor_params.h"
#include "shared/types.h"

namespace fovea::cuda {

/// Describes to TMA a tensor, the box it copies and the swizzle; encoded by the host.
struct alignas(64) TensorMapParam {
  std::uint64_t opaque[16];
};

struct Sm90ForwardParams {
  // Dimensions (head_dim, seqlen, head, batch), packed (head_dim, total, head, 1); boxes of a panel
  // (sm90_panel_elements: 64 elements and the swizzle of 128 bytes, or 32 and 64) x 64 rows (q, out; where heads share
  // a tile, 64 / heads_per_tile rows of so many heads) or tile_kv rows (k, v).
  // Paged k and v: (head_dim, row of the page, head, page), boxes of rows_per_box rows.
  TensorMapParam q, k, v, out;
  ForwardParams common;
  // of rows: num_q_tiles * num_heads_q * batch; packed: a bound; split: times max_splits
  std::int32_t num_tiles;
  std::int32_t* next_tile;  // dynamic schedule, more row tiles than CTAs: 0 at the launch
  /// Dynamic and dense: pairs (batch, head) of a section, and the first pair of the last section, a multiple of it,
  /// which has more of them.
  std::int32_t heads_per_section, last_section;
  /// [num_tiles] By the number of a row tile that has a row with a sum which is not finite, so that it may have met NaN
  /// or infinity at a key that the row does not see: the one that its CTA found before, or -1. Others are left as they
  /// are.
  std::int32_t* next_redo;
  // 0, which the compiler does not know: it chains instructions that it would otherwise reorder
  float zero;
  std::int32_t rows_per_box;  // paged: rows of a kv tile that surely lie in one page
  // Several CTAs on an SM: so many claims of its wave a row tile waits for; 0: none
  std::int32_t claims_of_wave;
  // Where K is codes: what is beside them. Then k above is a map of the codes, of boxes of head_dim bytes, a swizzle as
  // wide as they are; common.k are the rows that were rounded.
  QuantizedParams quantized;
  // Where V is: likewise. v is a map of rows of kQuantizedTile codes, tiles one below the other, of boxes of a tile.
  QuantizedValues values;
  ScaleParam k_scale, v_scale;  // of a cache of codes
  std::uint32_t* notes;         // of rows that are lost (lost_rows.h)
};

/// What sm90/attention_forward_short takes.
struct Sm90ShortParams {
  // Dimensions (head_dim, seqlen, head, batch), packed (head_dim, total, head, 1); boxes of a panel (128 bytes, or
  // 64, as the head dim's rows consist of, and their swizzle) x 64 rows (q) or tile_kv rows (k, v).
  TensorMapParam q, k, v;
  ForwardParams common;
};

/// What sm90/decode_latent takes.
struct Sm90LatentParams {
  // Dimensions (head_dim, head, row, batch); boxes of 64 elements of heads_per_tile heads of 64 / heads_per_tile rows,
  // 128-byte swizzle.
  TensorMapParam q;
  // Dimensions (64, row, head_dim / 64, head, batch), paged (64, row of the page, head_dim / 64, head, page); boxes of
  // three panels of rows, 128-byte swizzle. Where a box has not all rows of a tile (head_dim, row, 1, head, page),
  // boxes of 64 elements.
  TensorMapParam k;
  ForwardParams common;
  std::int32_t rows_per_box;  // rows of a tile of keys that surely lie in one page
};

/// What sm90/decode takes.
struct Sm90DecodeParams {
  // Dimensions (64, row, head_dim / 64, head, batch), paged (64, row of the page, head_dim / 64, head, page); boxes of
  // rows_per_box rows of a head, 128-byte swizzle. Where head_dim is padded (head_dim, row, 1, head, batch), boxes of
  // 64 elements. Of codes (head_dim, row, 1, head, batch), boxes of whole rows, a swizzle as wide as they are.
  TensorMapParam k, v;
  // Boxes of one slice and 64 elements, or all codes, for a box of slices of which not all are asked for.
  TensorMapParam k_slice, v_slice;
  // Where a warp brings queries: dimensions (head_dim, head, row, batch), packed (head_dim, head, total, 1); boxes of
  // 64 elements of heads_per_tile heads of 64 / heads_per_tile rows, 128-byte swizzle.
  TensorMapParam q;
  ForwardParams common;
  ScaleParam k_scale, v_scale;  // of codes
  std::int32_t rows_per_box;    // rows of a box of keys that surely lie in one page
  // Of L2's lines those of keys make room first; else they go by its own order, and sums of groups stay longest.
  std::int32_t keys_go_first;
  // takes_groups: row tiles of a sequence, for each CTA (common/key_share.cuh)
  float tiles_of_cta;
  // 0 or 1, which the compiler does not know: how often warpgroups rehearse the end of a sequence before the first one
  std::int32_t rehearsals;
};

}  // namespace fovea::cuda
