// Where the rows and keys of one sequence lie, and which part of the problem a CTA works on: dense, packed and cached
// layouts look the same from here on. Read tile_walk.cuh next.
#pragma once

#include "common/bits.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
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

FOVEA_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }
FOVEA_DEVICE int least(int a, int b) { return a < b ? a : b; }

// ---- what index tensors hold ---------------------------------------------------------------------
//
// Nobody has checked it. It is limited where it is read to what there is, so that wrong numbers give wrong values, and
// neither an access outside of the tensors nor a loop without an end.

/// The nearest number of [lo, hi].
FOVEA_DEVICE std::int64_t limited(std::int64_t value, std::int64_t lo, std::int64_t hi) {
  return value < lo ? lo : value > hi ? hi : value;
}

/// Of a page or slot, the low word: one of `count`.
FOVEA_DEVICE std::uint32_t one_of(std::int64_t value, std::int32_t count) {
  const auto word = static_cast<std::uint32_t>(value);
  const auto last = static_cast<std::uint32_t>(count) - 1;
  return word < last ? word : last;
}

/// Of a row of a sequence's pages: the entry of the table that names its page.
FOVEA_DEVICE std::int32_t entry_of_row(const ForwardParams& p, std::int32_t row) {
  return p.page_shift >= 0 ? row >> p.page_shift : row / p.page_size;
}

/// What the table says of rows [entry page_size, (entry + 1) page_size) of a sequence.
FOVEA_DEVICE std::int64_t page_entry(const ForwardParams& p, std::int64_t sequence,
                                     std::int64_t entry) {
  return index_at(p.page_table, sequence * p.page_table_row_stride, entry);
}

/// The page that holds them.
FOVEA_DEVICE std::int64_t page_at(const ForwardParams& p, std::int64_t sequence,
                                  std::int64_t entry) {
  return one_of(page_entry(p, sequence, entry), p.num_slots);
}

/// Rows of a packed tensor that are one sequence's.
struct PackedRows {
  std::int64_t begin;
  std::int32_t count;
};
FOVEA_DEVICE PackedRows packed_rows(const IndexParam& cu_seqlens, std::int32_t idx,
                                    std::int64_t total) {
  const std::int64_t begin = limited(index_at(cu_seqlens, idx), 0, total);
  const std::int64_t end = limited(index_at(cu_seqlens, idx + 1), begin, total);
  return {begin, static_cast<std::int32_t>(limited(end - begin, 0, kMostCounted))};
}
/// Those behind the last sequence.
FOVEA_DEVICE PackedRows trailing_rows(const IndexParam& cu_seqlens, std::int32_t num_sequences,
                                      std::int64_t total) {
  const std::int64_t begin = limited(index_at(cu_seqlens, num_sequences), 0, total);
  return {begin, static_cast<std::int32_t>(limited(total - begin, 0, kMostCounted))};
}

/// What a cache may be, as far as a kernel is compiled for it.
struct CacheKind {
  bool is_paged, has_packed_q;
};
template <auto spec>
inline constexpr CacheKind kCacheKind{spec.is_paged, spec.has_packed_q};

/// Rows that a sequence has room for. Params: ForwardParams, CombineParams or AppendParams.
template <CacheKind kind, class Params>
FOVEA_DEVICE std::int32_t capacity_of(const Params& p, std::int32_t idx) {
  if constexpr (kind.is_paged) {
    if (p.page_indptr.data != nullptr) {
      const std::int64_t pages = packed_rows(p.page_indptr, idx, p.num_listed).count;
      return static_cast<std::int32_t>(limited(pages * p.page_size, 0, p.capacity));
    }
  }
  return p.capacity;
}

/// Keys that the call appended to a sequence.
template <CacheKind kind, class Params>
FOVEA_DEVICE std::int32_t num_new_of(const Params& p, std::int32_t idx) {
  if constexpr (kind.has_packed_q) {
    if (p.cu_seqlens_new.data != nullptr)
      return packed_rows(p.cu_seqlens_new, idx, p.total_new).count;
  }
  return p.num_new;
}

/// Rows of a slot, or of a sequence's pages, that are its keys: as many as the plan was made for at most.
struct CachedRows {
  std::int32_t begin, count;
};
/// Params: ForwardParams or CombineParams.
template <CacheKind kind, class Params>
FOVEA_DEVICE CachedRows cached_rows(const Params& p, std::int32_t idx) {
  const std::int32_t capacity = capacity_of<kind>(p, idx);
  std::int32_t begin = 0;
  if (p.left_padding.data != nullptr)
    begin = static_cast<std::int32_t>(limited(index_at(p.left_padding, idx), 0, capacity));
  if (p.seqlens_kv.data == nullptr) return {begin, p.seqlen_kv};
  const std::int64_t in_use = limited(index_at(p.seqlens_kv, idx), 0, capacity);
  const std::int64_t end = limited(in_use + num_new_of<kind>(p, idx), begin, capacity);
  return {begin, static_cast<std::int32_t>(limited(end - begin, 0, p.seqlen_kv))};
}

/// Queries of a sequence whose tiles of rows are as many as every other's: those with more are another kernel's.
template <class Params>
FOVEA_DEVICE PackedRows few_queries(const Params& p, std::int32_t idx) {
  PackedRows rows = packed_rows(p.cu_seqlens_q, idx, p.total_q);
  if (rows.count > p.seqlen_q) rows.count = 0;
  return rows;
}

struct Sequence {
  std::int32_t idx;      // `batch` of programs
  std::int64_t q_batch;  // index of the batch dimension of q, out, lse
  std::int64_t q_row;    // first row of q
  // Index of the batch dimension of k and v; paged: of the row of the page table, or where the list of pages begins.
  std::int64_t kv_batch;
  std::int64_t kv_row;  // row of key 0
  std::int32_t seqlen_q, seqlen_kv;
  bool is_trailing;  // rows behind the last packed sequence: they see nothing, not even a sink
};

/// What one CTA computes: rows q_begin and on of heads_per_tile heads of one kv head, against the keys [kv_begin,
/// kv_end).
struct Work {
  Sequence sequence;
  std::int32_t q_begin;
  std::int32_t q_head, kv_head;  // the first of heads_per_tile
  std::int32_t kv_begin, kv_end;
  std::int32_t split;
  bool is_nothing;
};

/// In which slot of a cache the keys of sequence s.idx lie, or where its pages are named.
template <auto spec>
FOVEA_DEVICE void find_slot(const ForwardParams& p, Sequence& s) {
  if (p.slots.data != nullptr) s.kv_batch = one_of(index_at(p.slots, s.idx), p.num_slots);
  if constexpr (spec.is_paged) {
    if (p.page_indptr.data != nullptr)
      s.kv_batch = limited(index_at(p.page_indptr, s.idx), 0, p.num_listed);
  }
}

/// Where they lie there, and how many there are.
template <auto spec>
FOVEA_DEVICE void find_keys(const ForwardParams& p, Sequence& s) {
  find_slot<spec>(p, s);
  const CachedRows rows = cached_rows<kCacheKind<spec>>(p, s.idx);
  s.kv_row = rows.begin;
  s.seqlen_kv = rows.count;
}

template <auto spec>
FOVEA_DEVICE Sequence dense_sequence(const ForwardParams& p, std::int32_t idx) {
  Sequence s{idx, idx, 0, idx, 0, p.seqlen_q, p.seqlen_kv, false};
  find_keys<spec>(p, s);
  if constexpr (spec.has_packed_q) {
    const PackedRows rows = few_queries(p, idx);
    s.q_row = rows.begin;
    s.seqlen_q = rows.count;
  }
  return s;
}

/// How far packed_work has counted: tiles before sequence `first`.
struct PackedCursor {
  std::int32_t first = 0, tiles = 0;
};

/// Of a sequence: those of a warp are counted in 32 bits, whatever their lengths. More would be rows of more memory
/// than there is.
inline constexpr std::int32_t kMostTiles = 0xffffffffU / ptx::kWarpLanes;

/// Finds the `tile`-th tile of rows of a packed batch. Lanes count the tiles of a sequence each, from the cursor on, so
/// that a warp that asks for rising tiles counts each sequence once. Of those that a warp counts at once the one with
/// the most keys comes first, and its last rows, so that causal masks start with their longest rows: what is long and
/// starts late keeps the others waiting. Rows behind the last sequence are tiles too. All lanes get the same answer.
/// Params: ForwardParams, or PackedSides.
template <auto spec, class Params>
FOVEA_DEVICE Work packed_work(const Params& p, std::int32_t tile, int rows_per_tile,
                              PackedCursor& cursor) {
  const int lane = ptx::lane_idx();
  Work work{};
  work.is_nothing = true;
  tile -= cursor.tiles;
  for (; cursor.first <= p.num_sequences; cursor.first += ptx::kWarpLanes) {
    const int mine = cursor.first + lane;
    PackedRows rows{0, 0};
    std::int32_t keys = 0;
    if (mine < p.num_sequences) {
      rows = packed_rows(p.cu_seqlens_q, mine, p.total_q);
      if constexpr (spec.has_packed_q) {
        keys = cached_rows<kCacheKind<spec>>(p, mine).count;
        if (rows.count < p.fewest_queries) rows.count = 0;
      } else {
        keys = packed_rows(p.cu_seqlens_kv, mine, p.total_kv).count;
      }
    } else if (mine == p.num_sequences) {
      rows = trailing_rows(p.cu_seqlens_q, mine, p.total_q);
    }
    const int tiles = least(ceil_div(rows.count, rows_per_tile), kMostTiles);
    std::uint32_t before = 0, all = 0;  // tiles of sequences that come before mine, and of all
#pragma unroll 4
    for (int other = 0; other < ptx::kWarpLanes; ++other) {
      const int their_keys = ptx::shfl_idx(keys, other);
      const int their_tiles = ptx::shfl_idx(tiles, other);
      if (their_keys > keys || (their_keys == keys && other < lane))
        before += static_cast<std::uint32_t>(their_tiles);
      all += static_cast<std::uint32_t>(their_tiles);
    }
    const auto wanted = static_cast<std::uint32_t>(tile);
    const ptx::LaneMask owners =
        ptx::ballot(before <= wanted && wanted - before < static_cast<std::uint32_t>(tiles));
    if (owners == 0) {  // then `all` are no more than `tile`
      cursor.tiles += static_cast<std::int32_t>(all);
      tile -= static_cast<std::int32_t>(all);
      continue;
    }
    const int owner = lowest_bit(owners);
    const auto inside = static_cast<std::int32_t>(wanted - ptx::shfl_idx(before, owner));
    Sequence& s = work.sequence;
    s.idx = cursor.first + owner;
    s.is_trailing = s.idx == p.num_sequences;
    s.q_row = limited(index_at(p.cu_seqlens_q, s.idx), 0, p.total_q);
    s.seqlen_q = ptx::shfl_idx(rows.count, owner);
    s.seqlen_kv = ptx::shfl_idx(keys, owner);
    if constexpr (spec.has_packed_q) {
      s.kv_batch = s.idx;
      if (!s.is_trailing) find_keys<spec>(p, s);
    } else if (!s.is_trailing) {
      s.kv_row = limited(index_at(p.cu_seqlens_kv, s.idx), 0, p.total_kv);
    }
    work.q_begin = (ptx::shfl_idx(tiles, owner) - 1 - inside) * rows_per_tile;
    work.is_nothing = false;
    return work;
  }
  return work;
}

/// Of the keys of the sequence, those of one split.
template <auto spec>
FOVEA_DEVICE void take_split(Work& work, std::int32_t split) {
  const int seqlen_kv = work.sequence.seqlen_kv > 0 ? work.sequence.seqlen_kv : 0;
  const int keys = keys_per_split(seqlen_kv, spec.most_splits);
  work.split = split;
  work.kv_begin = split * keys;
  work.is_nothing = split > 0 && work.kv_begin >= seqlen_kv;  // without keys there is one, too
  work.kv_end = least(seqlen_kv, work.kv_begin + keys);
}

FOVEA_DEVICE bool ends_sequence(const Work& work) { return work.kv_end >= work.sequence.seqlen_kv; }

/// Is it the last split of its group (shared/split.h)?
FOVEA_DEVICE bool ends_group(const Work& work) {
  return (work.split + 1) % kSplitsOfGroup == 0 || ends_sequence(work);
}

/// Is it the first split of what a CTA takes at a time?
FOVEA_DEVICE bool begins_unit(const Work& work, Unit unit) {
  return unit == Unit::split ||
         work.split % (unit == Unit::group ? kSplitsOfGroup : kMostSplits) == 0;
}

/// The last?
FOVEA_DEVICE bool ends_unit(const Work& work, Unit unit) {
  return unit == Unit::split || (unit == Unit::group ? ends_group(work) : ends_sequence(work));
}

/// Where a key lies in K and in V: an entry of their first dimension (a page, where there are pages) and a row of it.
struct KvPlace {
  std::int64_t batch, row;

  /// Offset in elements.
  FOVEA_DEVICE_MEMBER std::int64_t in(const BshdParam& t, std::int32_t kv_head) const {
    return batch * t.batch_stride + row * t.row_stride + kv_head * t.head_stride;
  }
};

template <auto spec>
FOVEA_DEVICE KvPlace place_of_key(const ForwardParams& p, const Sequence& s, std::int32_t key) {
  if constexpr (!spec.is_paged) return {s.kv_batch, s.kv_row + key};
  const auto row = static_cast<std::int32_t>(s.kv_row + key);
  const std::int32_t entry = row / p.page_size;
  return {page_at(p, s.kv_batch, entry), row - entry * p.page_size};
}

/// The part of CTA `id`. Dense grids: pairs (batch, head unit) come in sections whose keys fit the L2 cache; in a
/// section tiles descend, so that causal masks start with their longest rows, and neighbours share keys.
template <auto spec>
FOVEA_DEVICE Work find_work(const ForwardParams& p, std::int32_t id) {
  constexpr int kRows = spec.tile_q / spec.heads_per_tile;
  const std::int32_t head_units = p.num_heads_q / spec.heads_per_tile;
  Work work{};
  std::int32_t unit = 0;
  if constexpr (spec.is_varlen) {
    unit = id % head_units;
    PackedCursor cursor;
    work = packed_work<spec>(p, id / head_units, kRows, cursor);
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
    work.sequence = dense_sequence<spec>(p, pair / head_units);
    work.q_begin = tile * kRows;
  }
  work.q_head = unit * spec.heads_per_tile;
  work.kv_head = work.q_head / p.group;
  work.kv_end = work.sequence.seqlen_kv > 0 ? work.sequence.seqlen_kv : 0;
  if constexpr (spec.is_split) take_split<spec>(work, ptx::block_idx().y);
  if constexpr (spec.has_packed_q && !spec.is_varlen)
    work.is_nothing = work.is_nothing || work.q_begin >= work.sequence.seqlen_q;
  return work;
}

/// Of this CTA.
template <auto spec>
FOVEA_DEVICE Work find_work(const ForwardParams& p) {
  return find_work<spec>(p, ptx::block_idx().x);
}

}  // namespace fovea::cuda
