// Which part of a backward problem a CTA works on, where its rows and the rows that it walks over lie, and which tiles
// these are. Dense and packed sequences look the same from here on.
#pragma once

#include "common/position.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"

namespace fovea::cuda {

/// A tile of rows, of queries or of keys, of one head of one sequence.
struct OwnedTile {
  Sequence sequence;
  std::int32_t begin;  // its first row
  std::int32_t head;   // q head, or kv head
  bool is_nothing;
};

/// What packed_work asks of a packed batch: `q` is the side whose rows come in tiles.
struct PackedSides {
  IndexParam cu_seqlens_q, cu_seqlens_kv;
  std::int64_t total_q, total_kv;
  std::int32_t num_sequences;
};

/// No cache is beside a backward problem.
struct NoCache {
  bool is_paged = false, has_packed_q = false;
};

template <bool owns_keys>
FOVEA_DEVICE OwnedTile packed_tile(const ForwardParams& p, std::int32_t tile, int rows) {
  PackedSides sides{p.cu_seqlens_q, p.cu_seqlens_kv, p.total_q, p.total_kv, p.num_sequences};
  if constexpr (owns_keys)
    sides = {p.cu_seqlens_kv, p.cu_seqlens_q, p.total_kv, p.total_q, p.num_sequences};
  PackedCursor cursor;
  const Work work = packed_work<NoCache{}>(sides, tile, rows, cursor);
  OwnedTile owned{work.sequence, work.q_begin, 0, work.is_nothing};
  if constexpr (owns_keys) {
    Sequence& s = owned.sequence;
    // The first keys of a sequence, which most rows see, come first.
    owned.begin = (ceil_div(s.seqlen_q, rows) - 1) * rows - work.q_begin;
    s = {s.idx,
         0,
         work.sequence.kv_row,
         0,
         work.sequence.q_row,
         work.sequence.seqlen_kv,
         work.sequence.seqlen_q,
         s.is_trailing};
  }
  return owned;
}

/// The tile of number `id`. Dense: pairs (batch, head) come in sections whose walked rows fit the L2 cache; in a
/// section the tiles come first that walk longest under a causal mask, last queries and first keys.
template <bool is_varlen, bool owns_keys>
FOVEA_DEVICE OwnedTile find_tile(const BackwardParams& b, std::int32_t id, int rows) {
  const ForwardParams& p = b.forward;
  const std::int32_t heads = owns_keys ? p.num_heads_kv : p.num_heads_q;
  OwnedTile tile{};
  if constexpr (is_varlen) {
    tile = packed_tile<owns_keys>(p, id / heads, rows);
    tile.head = id % heads;
  } else {
    const std::int32_t pairs = p.num_sequences * heads;
    const std::int32_t num_tiles = ceil_div(owns_keys ? p.seqlen_kv : p.seqlen_q, rows);
    const std::int32_t pairs_per_section =
        owns_keys ? b.kv_pairs_per_section : b.q_pairs_per_section;
    const std::int32_t first = id / (num_tiles * pairs_per_section) * pairs_per_section;
    const std::int32_t size = least(pairs_per_section, pairs - first);
    const std::int32_t rest = id - first * num_tiles;
    const std::int32_t pair = first + rest % size;
    const std::int32_t idx = pair / heads;
    tile.head = pair % heads;
    tile.begin = (owns_keys ? rest / size : num_tiles - 1 - rest / size) * rows;
    tile.sequence = {idx, idx, 0, idx, 0, p.seqlen_q, p.seqlen_kv, false};
  }
  return tile;
}

/// Which word stands for the tile of kStatisticsRows rows that row `begin` of a sequence and head lies in.
template <bool is_varlen, bool owns_keys>
FOVEA_DEVICE std::int64_t tile_place(const ForwardParams& p, const Sequence& s, std::int32_t head,
                                     std::int32_t begin) {
  const std::int32_t heads = owns_keys ? p.num_heads_kv : p.num_heads_q;
  const std::int32_t idx = begin / kStatisticsRows;
  if constexpr (is_varlen) {
    const std::int64_t of_head =
        num_packed_tiles(owns_keys ? p.total_kv : p.total_q, p.num_sequences);
    return head * of_head + packed_tiles_begin(owns_keys ? s.kv_row : s.q_row, s.idx) + idx;
  }
  const std::int32_t length = owns_keys ? p.seqlen_kv : p.seqlen_q;
  return (s.idx * std::int64_t{heads} + head) * ceil_div(length, kStatisticsRows) + idx;
}

/// By a thread that has found gradients of the tile not finite; others may say so, too.
template <bool is_varlen, bool owns_keys>
FOVEA_DEVICE void ask_redo(const BackwardParams& b, const Sequence& s, std::int32_t head,
                           std::int32_t begin) {
  const RedoTiles& redo = owns_keys ? b.redo_keys : b.redo_queries;
  ptx::atom_add_global(redo.tiles + tile_place<is_varlen, owns_keys>(b.forward, s, head, begin), 1);
  ptx::atom_add_global(redo.any, 1);
}

// ---- what is known of rows -----------------------------------------------------------------------

/// Where the statistics of row 0 of a sequence and head lie.
template <bool is_varlen>
FOVEA_DEVICE std::int64_t statistics_at(const RowStatistics& rows, const Sequence& s,
                                        std::int32_t q_head) {
  const std::int64_t head = q_head * rows.head_stride;
  if constexpr (is_varlen) return head + statistics_begin(s.q_row, s.idx);
  return head + s.idx * rows.batch_stride;
}

/// Of one row, where it is not read from memory: padding.
struct RowStatistic {
  float log_sum, delta, origin;
};

// ---- the walk ------------------------------------------------------------------------------------

/// A tile of the side that is walked over, and the q head that it belongs to.
struct WalkedTile {
  std::int32_t idx;  // -1: there are no more
  std::int32_t q_head;
  bool is_full;  // every existing row sees every existing key
};

/// Every tile of queries, of one q head of a group after the other, that sees something of the owned keys; or the kv
/// tiles that the owned queries see.
template <class Mods, bool owns_keys, WalkOrder order = WalkOrder::rising>
class OwnerWalk {
 public:
  FOVEA_DEVICE_MEMBER OwnerWalk(const ForwardParams& p, const OwnedTile& owned, int rows,
                                int rows_walked)
      : span_(span_of(p, owned, rows)),
        tiles_(span_, {0, 0x7fffffff, rows_walked}, p.captures),
        last_head_(owns_keys ? (owned.head + 1) * p.group - 1 : owned.head) {}

  FOVEA_DEVICE_MEMBER WalkedTile next() {
    for (;;) {
      VisitedTile tile;
      if (tiles_.next(tile)) return {tile.idx, span_.q_head_begin, tile.is_full};
      if (span_.q_head_begin == last_head_) return {-1, last_head_, false};
      ++span_.q_head_begin;
      ++span_.q_head_end;
      tiles_.restart();
    }
  }

  FOVEA_DEVICE_MEMBER static TileSpan span_of(const ForwardParams& p, const OwnedTile& owned,
                                              int rows) {
    const Sequence& s = owned.sequence;
    TileSpan span{};
    span.batch = s.idx;
    span.q_head_begin = owns_keys ? owned.head * p.group : owned.head;
    span.q_head_end = span.q_head_begin + 1;
    span.kv_head = owns_keys ? owned.head : owned.head / p.group;
    span.seqlen_q = s.seqlen_q;
    span.seqlen_kv = s.seqlen_kv;
    const std::int32_t end = least(owned.begin + rows, owns_keys ? s.seqlen_kv : s.seqlen_q);
    (owns_keys ? span.kv_begin : span.q_begin) = owned.begin;
    (owns_keys ? span.kv_end : span.q_end) = end;
    return span;
  }

 private:
  TileSpan span_;
  TileWalk<Mods, order, owns_keys ? WalkAxis::queries : WalkAxis::keys> tiles_;
  std::int32_t last_head_;
};

}  // namespace fovea::cuda
