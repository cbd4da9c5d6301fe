// Which row tile comes next, and which kv tiles it visits: one warp, ahead of all others. Read load.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/redo.cuh"

namespace fovea::cuda::sm90 {

/// Row tile number `id` of a dense launch. With a dynamic schedule heads come in sections, the row tiles of a section
/// descend, heads side by side. The last section is as large as fits the L2 cache, so that a causal mask ends with many
/// short rows. Those before are small: while CTAs are in different ones, some load keys from memory and others have
/// them in the cache.
template <auto spec>
FOVEA_DEVICE RowTile dense_row_tile(const Sm90ForwardParams& p, std::int32_t id) {
  const ForwardParams& c = p.common;
  std::int32_t pair = id / c.num_q_tiles;
  std::int32_t idx = id - pair * c.num_q_tiles;
  if constexpr (spec.is_dynamic) {
    std::int32_t first = id / (c.num_q_tiles * p.heads_per_section) * p.heads_per_section;
    std::int32_t size = p.heads_per_section;
    if (first >= p.last_section) {
      first = p.last_section;
      size = c.num_heads_q * c.num_sequences - first;
    }
    const std::int32_t rest = id - first * c.num_q_tiles;
    idx = c.num_q_tiles - 1 - rest / size;
    pair = first + rest % size;
  }
  const std::int32_t batch = pair / c.num_heads_q;
  return {idx, pair - batch * c.num_heads_q, batch, 0, 0};
}

/// Which split of which row tile: neighbours are heads of one sequence, which lie side by side in its pages.
template <auto spec>
FOVEA_DEVICE RowTile split_row_tile(const ForwardParams& c, std::int32_t id) {
  const std::int32_t units = c.num_heads_q / spec.heads_per_tile;
  const std::int32_t pair = id / units;
  const std::int32_t tile = pair / c.max_splits;
  const std::int32_t batch = tile / c.num_q_tiles;
  return {tile - batch * c.num_q_tiles, (id - pair * units) * spec.heads_per_tile, batch,
          pair - tile * c.max_splits, 0};
}

/// Claims row tiles, and finds the kv tiles of each, one row tile ahead of the loading warp.
template <auto spec, class Mods>
struct Schedule {
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kSlots> slots{1};
  Ring<2> groups{1};
  Ring<1> claims{0}, rounds{0};
  PackedCursor cursor{};
  std::uint32_t number = 1;  // of the next row tile that is posted

  /// The bit of the i-th tile of a group from its left, in the order of the walk.
  FOVEA_DEVICE std::uint32_t bit_of_tile(std::int32_t i) {
    return T::kWalkOrder == WalkOrder::falling ? 0x80000000U >> i : 1U << i;
  }

  FOVEA_DEVICE_MEMBER explicit Schedule(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    RedoList<spec> redo(cta);
    std::int32_t id = ptx::block_idx().x;
    bool is_empty = true;  // this round, by now
    for (;;) {
      SequencePlace place{0, 0, cta.p.common.seqlen_q, cta.p.common.seqlen_kv};
      RowTile rows = row_tile_at(id, place);
      if (rows.is_any_end() && is_empty) rows = RowTile::end();
      publish(rows, place, id);
      if (rows.is_end()) return;
      if (rows.is_any_end()) {
        cta.await(cta.barrier(T::kAt.round_done, 0), rounds.parity);
        rounds.advance();
        if (!cta.has_redo()) return;
        id = redo.next();
        cursor = {};
        is_empty = true;
        continue;
      }
      is_empty = false;
      ++number;
      find_kv_tiles(rows, place);
      // As late as can be: the order of claims is what balances the load.
      cta.await(cta.barrier(T::kAt.claim, 0), claims.parity);
      claims.advance();
      id = redo.pass == Pass::all ? claim(id) : cta.p.num_tiles;
      if constexpr (spec.ctas_per_sm > 1) await_wave(id);
    }
  }

 private:
  /// Claims further where there is nothing to do at `id`.
  FOVEA_DEVICE_MEMBER RowTile row_tile_at(std::int32_t& id, SequencePlace& place) {
    if constexpr (spec.is_split) return next_split(id, place);
    if (id >= cta.p.num_tiles) return RowTile::round_end();
    if constexpr (!spec.is_varlen) {
      const RowTile rows = dense_row_tile<spec>(cta.p, id);
      if constexpr (spec.is_cached) take_cached_keys(rows.batch, place);
      return rows;
    }
    // Heads side by side: they share keys, or at least the sequence.
    const std::int32_t number = id / cta.p.common.num_heads_q;
    const Work work = packed_work<spec>(cta.p.common, number, spec.tile_q, cursor);
    if (work.is_nothing) return RowTile::round_end();
    const Sequence& s = work.sequence;
    place = {static_cast<std::int32_t>(s.q_row), static_cast<std::int32_t>(s.kv_row), s.seqlen_q,
             s.seqlen_kv};
    return {work.q_begin / spec.tile_q, id - number * cta.p.common.num_heads_q, s.idx, number, 0};
  }

  /// Passes over splits that a sequence has room for, but no keys; packed, over row tiles behind its queries.
  FOVEA_DEVICE_MEMBER RowTile next_split(std::int32_t& id, SequencePlace& place) const {
    const ForwardParams& c = cta.p.common;
    for (; id < cta.p.num_tiles; id = claim(id)) {
      const RowTile rows = split_row_tile<spec>(c, id);
      take_cached_keys(rows.batch, place);
      if constexpr (spec.has_packed_q) take_packed_queries(rows.batch, place);
      const bool has_rows = !spec.has_packed_q || rows.idx * T::kQueries < place.seqlen_q;
      if (has_rows && rows.number < num_splits(place.seqlen_kv, spec.most_splits)) return rows;
    }
    return RowTile::round_end();
  }

  /// Keys that a sequence has by now: whoever appends does not ask the host.
  FOVEA_DEVICE_MEMBER void take_cached_keys(std::int32_t batch, SequencePlace& place) const {
    const CachedRows rows = cached_rows<kCacheKind<spec>>(cta.p.common, batch);
    place.kv_row = rows.begin;
    place.seqlen_kv = rows.count;
  }

  FOVEA_DEVICE_MEMBER void take_packed_queries(std::int32_t batch, SequencePlace& place) const {
    const PackedRows rows = few_queries(cta.p.common, batch);
    place.q_row = static_cast<std::int32_t>(rows.begin);
    place.seqlen_q = static_cast<std::int32_t>(rows.count);
  }

  FOVEA_DEVICE_MEMBER TileSpan span_of(const RowTile& rows, const SequencePlace& place) const {
    const ForwardParams& c = cta.p.common;
    TileSpan span{};
    span.batch = rows.batch;
    span.q_head_begin = rows.q_head;
    span.q_head_end = rows.q_head + spec.heads_per_tile;
    span.kv_head = rows.q_head / c.group;
    span.q_begin = rows.idx * T::kQueries;
    span.q_end = least(span.q_begin + T::kQueries, place.seqlen_q);
    span.seqlen_q = place.seqlen_q;
    span.seqlen_kv = place.seqlen_kv;
    return span;
  }

  FOVEA_DEVICE_MEMBER TileRange tiles_of(const RowTile& rows, const SequencePlace& place) const {
    const std::int32_t end = ceil_div(place.seqlen_kv, spec.tile_kv);
    if constexpr (!spec.is_split) return {0, end, spec.tile_kv};
    const std::int32_t tiles = keys_per_split(place.seqlen_kv, spec.most_splits) / spec.tile_kv;
    const std::int32_t begin = rows.number * tiles;
    return {begin, least(begin + tiles, end), spec.tile_kv};
  }

  FOVEA_DEVICE_MEMBER void find_kv_tiles(const RowTile& rows, const SequencePlace& place) {
    const TileSpan span = span_of(rows, place);
    const TileRange tiles = tiles_of(rows, place);
    TileWalk<Mods, T::kWalkOrder> walk(span, tiles, cta.p.common.captures);
    VisitedGroup group{}, next{};
    // Rows that see nothing visit one tile, masked as a whole: their output is written like any other.
    if (!walk.next_group(group)) group = {tiles.begin, bit_of_tile(0), 0};
    for (;;) {
      const bool has_next = walk.next_group(next);
      push(group, !has_next, place.seqlen_kv);
      if (!has_next) break;
      group = next;
    }
  }

  /// The tile that the end of the keys cuts needs its mask.
  FOVEA_DEVICE_MEMBER void push(VisitedGroup group, bool is_last, std::int32_t seqlen_kv) {
    const std::int32_t cut = seqlen_kv / spec.tile_kv - group.begin;
    if (cut >= 0 && cut < 32) group.full &= ~bit_of_tile(cut);
    cta.await(cta.barrier(T::kAt.group_empty, groups.stage), groups.parity);
    if (cta.lane == 0) {
      ptx::st_shared(cta.smem + T::kAt.groups_of_tiles + 16 * groups.stage,
                     ptx::U32x4{static_cast<std::uint32_t>(group.begin), group.visible, group.full,
                                is_last ? 1U : 0U});
      ptx::mbarrier_arrive(cta.barrier(T::kAt.group_full, groups.stage));
    }
    groups.advance();
  }

  FOVEA_DEVICE_MEMBER std::int32_t claim(std::int32_t id) const {
    const std::int32_t num_ctas = ptx::grid_dim().x;
    if (!spec.is_dynamic || cta.p.num_tiles <= num_ctas) return id + num_ctas;
    std::int32_t next = 0;
    if (cta.lane == 0) next = ptx::atom_add_global(cta.p.next_tile, 1) + num_ctas;
    return ptx::shfl_idx(next, 0);
  }

  /// Where the keys of a head do not fit the L2 cache: waits until enough CTAs have claimed a row tile of the same
  /// wave. Those that begin together walk the keys in step, and find there what others have just loaded. Bits do not
  /// depend on it, and whoever waits in vain goes on.
  FOVEA_DEVICE_MEMBER void await_wave(std::int32_t id) const {
    constexpr int kMostLooks = 128;  // some 1,000 clocks each: a row tile of 64 tiles takes 200,000
    if (cta.p.claims_of_wave == 0 || id >= cta.p.num_tiles) return;
    const std::int32_t num_ctas = ptx::grid_dim().x;
    const std::int32_t wanted = (id / num_ctas - 1) * num_ctas + cta.p.claims_of_wave;
#pragma unroll 1
    for (int i = 0; i < kMostLooks; ++i) {
      std::int32_t claims = 0;
      if (cta.lane == 0) claims = ptx::ld_acquire_global(cta.p.next_tile);
      if (ptx::shfl_idx(claims, 0) >= wanted) return;
    }
  }

  /// `id` is of no use with an end, and does no harm: the next row tile comes behind a round.
  FOVEA_DEVICE_MEMBER void publish(const RowTile& rows, const SequencePlace& place,
                                   std::int32_t id) {
    cta.await(cta.barrier(T::kAt.slot_empty, slots.stage), slots.parity);
    if (cta.lane == 0) {
      const SharedAddress slot = cta.slot_at(slots.stage);
      ptx::st_shared(slot, ptx::U32x4{static_cast<std::uint32_t>(rows.idx),
                                      static_cast<std::uint32_t>(rows.q_head),
                                      static_cast<std::uint32_t>(rows.batch),
                                      static_cast<std::uint32_t>(rows.number)});
      if constexpr (T::kPostsPlace) ptx::st_shared(slot + 16, ptx::bit_cast<ptx::U32x4>(place));
      ptx::st_shared(cta.id_at(number), static_cast<std::uint32_t>(id));
      ptx::mbarrier_arrive(cta.barrier(T::kAt.slot_full, slots.stage));
    }
    slots.advance();
  }
};

}  // namespace fovea::cuda::sm90
