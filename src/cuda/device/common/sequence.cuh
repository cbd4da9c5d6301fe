// Where the rows and keys of one sequence lie, and which part of the problem a CTA works on: dense, packed and cached layouts look
// the same from here on. Read tile_walk.cuh next.
#pragma once

#include "common/bits.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/split.h"

namespace fovea::cuda {

/// Element i of the row that begins at `row`.
FOVEA_DEVICE std::int64_t index_at(const IndexParam& tensor, std::int64_t row, std::int64_t i) {
  const std::int64_t at = row + i * tensor.stride;
  if (tensor.is_wide != 0)
    return ptx::ld_global(static_cast<const std::int64_t*>(tensor.data) + at);
  return ptx::ld_global(static_cast<const std::int32_t*>(tensor.data) + at);
}
FOVEA_DEVICE std::int64_t index_at(const IndexParam& tensor, std::int64_t i) {
  return index_at(tensor, 0, i);
}

/// The page that holds rows [entry page_size, (entry + 1) page_size) of a sequence.
FOVEA_DEVICE std::int64_t page_at(const ForwardParams& p, std::int64_t sequence,
                                  std::int64_t entry) {
  return index_at(p.page_table, sequence * p.page_table_row_stride, entry);
}

FOVEA_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
FOVEA_DEVICE int least(int a, int b) { return a < b ? a : b; }

struct Sequence {
  std::int32_t idx;       // `batch` of programs
  std::int64_t q_batch;   // index of the batch dimension of q, out, lse
  std::int64_t q_row;     // first row of q
  std::int64_t kv_batch;  // index of the batch dimension of k and v; paged: of the page table
  std::int64_t kv_row;    // row of key 0
  std::int32_t seqlen_q, seqlen_kv;
  bool is_trailing;  // rows behind the last packed sequence: they see nothing, not even a sink
};

/// What one CTA computes: rows q_begin and on of heads_per_tile heads of one kv head, against the keys [kv_begin, kv_end).
struct Work {
  Sequence sequence;
  std::int32_t q_begin;
  std::int32_t q_head, kv_head;  // the first of heads_per_tile
  std::int32_t kv_begin, kv_end;
  std::int32_t split;
  bool is_nothing;
};

FOVEA_DEVICE Sequence dense_sequence(const ForwardParams& p, std::int32_t idx) {
  Sequence s{idx, idx, 0, idx, 0, p.seqlen_q, p.seqlen_kv, false};
  if (p.slots.data != nullptr) s.kv_batch = index_at(p.slots, idx);
  if (p.left_padding.data != nullptr) s.kv_row = index_at(p.left_padding, idx);
  if (p.seqlens_kv.data != nullptr) {
    s.seqlen_kv = static_cast<std::int32_t>(index_at(p.seqlens_kv, idx) - s.kv_row) + p.num_new;
  }
  return s;
}

/// How far packed_work has counted: tiles before sequence `first`.
struct PackedCursor {
  std::int32_t first = 0, tiles = 0;
};

/// Finds the `tile`-th tile of rows of a packed batch. Lanes count the tiles of 32 sequences at a time, from the cursor on, so that a
/// warp that asks for rising tiles counts each sequence once. Of 32 sequences the one with the most keys comes first, and its last rows,
/// so that causal masks start with their longest rows: what is long and starts late keeps the others waiting. Rows behind the last
/// sequence are tiles too. All lanes get the same answer.
FOVEA_DEVICE Work packed_work(const ForwardParams& p, std::int32_t tile, int rows_per_tile,
                              PackedCursor& cursor) {
  const int lane = ptx::lane_idx();
  Work work{};
  work.is_nothing = true;
  tile -= cursor.tiles;
  for (; cursor.first <= p.num_sequences; cursor.first += 32) {
    const int mine = cursor.first + lane;
    std::int64_t rows = 0;
    int keys = 0;
    if (mine < p.num_sequences) {
      rows = index_at(p.cu_seqlens_q, mine + 1) - index_at(p.cu_seqlens_q, mine);
      keys =
          static_cast<int>(index_at(p.cu_seqlens_kv, mine + 1) - index_at(p.cu_seqlens_kv, mine));
    } else if (mine == p.num_sequences) {
      rows = p.total_q - index_at(p.cu_seqlens_q, mine);
    }
    const int tiles = static_cast<int>((rows + rows_per_tile - 1) / rows_per_tile);
    int before = 0, all = 0;  // tiles of sequences that come before mine, and of all 32
#pragma unroll 4
    for (int other = 0; other < 32; ++other) {
      const int their_keys = ptx::shfl_idx(keys, other);
      const int their_tiles = ptx::shfl_idx(tiles, other);
      if (their_keys > keys || (their_keys == keys && other < lane)) before += their_tiles;
      all += their_tiles;
    }
    const std::uint32_t owners = ptx::ballot(before <= tile && tile < before + tiles);
    if (owners == 0) {
      cursor.tiles += all;
      tile -= all;
      continue;
    }
    const int owner = lowest_bit(owners);
    const int inside = tile - ptx::shfl_idx(before, owner);
    Sequence& s = work.sequence;
    s.idx = cursor.first + owner;
    s.is_trailing = s.idx == p.num_sequences;
    s.q_row = index_at(p.cu_seqlens_q, s.idx);
    s.seqlen_q = ptx::shfl_idx(static_cast<int>(rows), owner);
    s.seqlen_kv = ptx::shfl_idx(keys, owner);
    if (!s.is_trailing) s.kv_row = index_at(p.cu_seqlens_kv, s.idx);
    work.q_begin = (ptx::shfl_idx(tiles, owner) - 1 - inside) * rows_per_tile;
    work.is_nothing = false;
    return work;
  }
  return work;
}

/// Of the keys of the sequence, those of one split.
template <ForwardSpec spec>
FOVEA_DEVICE void take_split(Work& work, std::int32_t split) {
  const int seqlen_kv = work.sequence.seqlen_kv > 0 ? work.sequence.seqlen_kv : 0;
  const int keys = keys_per_split(seqlen_kv, spec.most_splits);
  work.split = split;
  work.is_nothing = split >= num_splits(seqlen_kv, spec.most_splits);
  work.kv_begin = split * keys;
  work.kv_end = least(seqlen_kv, work.kv_begin + keys);
}

/// The CTA's part. Dense grids: pairs (batch, head unit) come in sections whose keys fit the L2 cache; in a section tiles descend, so
/// that causal masks start with their longest rows, and neighbours share keys.
template <ForwardSpec spec>
FOVEA_DEVICE Work find_work(const ForwardParams& p) {
  constexpr int kRows = spec.tile_q / spec.heads_per_tile;
  const std::int32_t id = ptx::block_idx().x;
  const std::int32_t head_units = p.num_heads_q / spec.heads_per_tile;
  Work work{};
  std::int32_t unit = 0;
  if constexpr (spec.is_varlen) {
    unit = id % head_units;
    PackedCursor cursor;
    work = packed_work(p, id / head_units, kRows, cursor);
    if (work.is_nothing) return work;
  } else {
    const std::int32_t units = p.num_sequences * head_units;
    const std::int32_t section = id / (p.num_q_tiles * p.heads_per_section);
    const std::int32_t first = section * p.heads_per_section;
    const std::int32_t size = least(p.heads_per_section, units - first);
    const std::int32_t rest = id - first * p.num_q_tiles;
    const std::int32_t tile = p.num_q_tiles - 1 - rest / size;
    const std::int32_t pair = first + rest % size;
    unit = pair % head_units;
    work.sequence = dense_sequence(p, pair / head_units);
    work.q_begin = tile * kRows;
  }
  work.q_head = unit * spec.heads_per_tile;
  work.kv_head = work.q_head / p.group;
  work.kv_end = work.sequence.seqlen_kv > 0 ? work.sequence.seqlen_kv : 0;
  if constexpr (spec.is_split) take_split<spec>(work, ptx::block_idx().y);
  return work;
}

}  // namespace fovea::cuda
