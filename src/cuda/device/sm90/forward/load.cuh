// Q, K and V into shared memory: in which order, and when there is room. How they get there: copy_tma.cuh, or
// copy_cp_async.cuh. Read compute.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm90/forward/copy_codes.cuh"
#include "sm90/forward/copy_cp_async.cuh"
#include "sm90/forward/copy_tma.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

template <auto spec, bool loads_by_cp_async = spec.loads_by_cp_async>
struct CopiesOf {
  using Type = TmaCopies<spec>;
};
template <auto spec>
struct CopiesOf<spec, true> {
  using Type = CpAsyncCopies<spec>;
};
template <auto spec>
requires(spec.has_codes()) struct CopiesOf<spec, true> {
  using Type = CodeCopies<spec>;
};

/// A warp that loads: one, or two that copy half of each tile.
template <auto spec>
struct Load {
  using T = Traits<spec>;
  const Cta<spec>& cta;
  typename CopiesOf<spec>::Type copies;
  Ring<T::kQStages> q{1};
  Ring<T::kStages> k{1}, v{1};
  Ring<T::kSlots> slots{0};
  Ring<2> groups{0};

  /// What is left of the kv tiles of this row tile.
  VisitedGroup group{0, 0, 0};
  bool is_last_group = false;
  bool has_claimed = false;  // the next row tile may be claimed, and Schedule knows
  Pass pass = Pass::all;

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta) : cta(of_cta), copies(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    copies.clear_unused_rows();
    KvRows pending = KvRows::none();  // whose values follow the keys of the tile after it
    for (;;) {
      copies.before_wait(cta.barrier(T::kAt.slot_full, slots.stage), slots.parity);
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.is_end()) return;
      if (rows.is_any_end()) {
        if (T::kOverlapsTiles) load_values(pending);
        copies.finish();
        if (!cta.end_round(pass)) return;
        continue;
      }
      pass = cta.pass();
      const SequencePlace place = cta.place_of(rows);
      cta.done_with(rows);
      const std::int32_t batch = kv_batch(rows);
      is_last_group = has_claimed = false;
      VisitedTile tile{}, next{};
      visit(tile);
      std::int32_t next_pages = copies.look_up(place, batch, tile);
      for (bool is_first = true;; is_first = false) {
        const std::int32_t pages = next_pages;
        const bool has_next = visit(next);
        if (has_next) next_pages = copies.look_up(place, batch, next);
        const KvRows kv = kv_rows(rows, place, tile, T::kCopiesPages ? pages : batch);
        load_tile(rows, place, kv, tile, next, T::kCopiesPages ? next_pages : batch, has_next,
                  is_first, pending);
        if (!has_next) break;
        tile = next;
      }
      if (!T::kOverlapsTiles) load_values(pending);
    }
  }

 private:
  /// Index of the row tile's keys in the last dimension of K and V; paged: the row of the page table, or where the list
  /// of pages begins.
  FOVEA_DEVICE_MEMBER std::int32_t kv_batch(const RowTile& rows) const {
    if constexpr (!spec.is_cached) return Cta<spec>::map_batch(rows);
    Sequence sequence{};
    sequence.kv_batch = sequence.idx = rows.batch;
    if (!spec.is_varlen || rows.batch < cta.p.common.num_sequences)
      find_slot<spec>(cta.p.common, sequence);
    return static_cast<std::int32_t>(sequence.kv_batch);
  }

  FOVEA_DEVICE_MEMBER KvRows kv_rows(const RowTile& rows, const SequencePlace& place,
                                     VisitedTile tile, std::int32_t batch) const {
    return {tile.idx,
            rows.q_head / cta.p.common.group,
            batch,
            place.kv_row,
            place.seqlen_kv - tile.idx * spec.tile_kv,
            Cta<spec>::first_tile_of_codes(rows, place),
            rows.batch};
  }

  /// The next kv tile, in the order of the walk; false behind the last. There is at least one.
  FOVEA_DEVICE_MEMBER bool visit(VisitedTile& tile) {
    if (group.visible == 0) {
      if (is_last_group) return false;
      open_group();
    }
    tile = take_tile<T::kWalkOrder>(group);
    // One tile is left, or none: what is in flight by now covers the time that a claim takes.
    if (is_last_group && !has_claimed && (group.visible & (group.visible - 1)) == 0) {
      if (cta.lane == 0 && cta.loader() == 0) ptx::mbarrier_arrive(cta.barrier(T::kAt.claim, 0));
      has_claimed = true;
    }
    return true;
  }

  FOVEA_DEVICE_MEMBER KvTile kv_tile_of(VisitedTile tile) const {
    return KvTile::make(tile.idx, tile.is_full, pass);
  }

  FOVEA_DEVICE_MEMBER void open_group() {
    acquire(T::kAt.group_full, groups.stage, groups.parity);
    const auto words =
        ptx::ld_shared<ptx::U32x4>(cta.smem + T::kAt.groups_of_tiles + 16 * groups.stage);
    cta.release(cta.barrier(T::kAt.group_empty, groups.stage));
    groups.advance();
    group = {static_cast<std::int32_t>(ptx::shfl_idx(words.x, 0)), ptx::shfl_idx(words.y, 0),
             ptx::shfl_idx(words.z, 0)};
    is_last_group = ptx::shfl_idx(words.w, 0) != 0;
  }

  FOVEA_DEVICE_MEMBER void acquire(int kind, int i, std::uint32_t parity) {
    const SharedAddress barrier = cta.barrier(kind, i);
    copies.before_wait(barrier, parity);
    cta.await(barrier, parity);
  }

  /// Keys of this tile, values of the one before; with the first, the rows' queries, the first group's before anything
  /// else.
  FOVEA_DEVICE_MEMBER void load_tile(const RowTile& rows, const SequencePlace& place,
                                     const KvRows& kv, VisitedTile tile, VisitedTile next,
                                     std::int32_t next_batch, bool has_next, bool is_first,
                                     KvRows& pending) {
    if constexpr (spec.has_codes())
      if (!copies.has_keys()) copies.ask_for_keys(kv);
    if (is_first) load_queries(rows, place, 0);
    acquire(T::kAt.k_empty, k.stage, k.parity);
    copies.keys(k.stage, kv,
                {kv_tile_of(tile).word, (has_next ? kv_tile_of(next) : KvTile::none()).word});
    k.advance();
    if (is_first) {
      for (int group = 1; group < T::kGroups; ++group) load_queries(rows, place, group);
      q.advance();
    }
    if constexpr (spec.has_codes())
      if (has_next) copies.ask_for_keys(kv_rows(rows, place, next, next_batch));
    load_values(pending);
    if constexpr (spec.has_codes()) copies.ask_for_values(kv);
    pending = kv;
  }

  FOVEA_DEVICE_MEMBER void load_queries(const RowTile& rows, const SequencePlace& place,
                                        int group) {
    acquire(T::kAt.q_empty, q.stage * T::kGroups + group, q.parity);
    copies.queries(q.stage, rows, place, group);
  }

  FOVEA_DEVICE_MEMBER void load_values(KvRows& pending) {
    if (pending.idx < 0) return;
    acquire(T::kAt.v_empty, v.stage, v.parity);
    copies.values(v.stage, pending, pass);
    v.advance();
    pending.idx = -1;
  }
};

}  // namespace fovea::cuda::sm90
