// Q, K and V into shared memory: one warp, by TMA. Read compute.cuh next.
#pragma once

#include "common/tile_walk.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/redo.cuh"

namespace fovea::cuda::sm90 {

template <Sm90ForwardSpec spec>
struct Load {
  using L = Layout<spec>;
  using T = Traits<spec>;
  const Cta<spec>& cta;
  Ring<T::kQStages> q{1};
  Ring<T::kStages> k{1}, v{1};
  Ring<T::kSlots> slots{0};
  Ring<2> groups{0};
  Ring<1> landings{0};

  /// What is left of the kv tiles of this row tile.
  VisitedGroup group{0, 0, 0};
  bool is_last_group = false;
  bool has_claimed = false;  // the next row tile may be claimed, and Schedule knows
  Pass pass = Pass::all;

  /// A kv tile whose values are still to be loaded: they follow the keys of the tile after it.
  struct Pending {
    std::int32_t idx, kv_head, batch, kv_row;  // paged: for the batch the page
  };

  // Paged: of the kv tile that was visited last and of the one to load, the page of this lane's box.
  std::int32_t next_page, page;
  std::int32_t num_keys;  // of the pending tile from its first on, where values are cleared

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    clear_unused_rows();
    Pending pending{-1, 0, 0, 0};
    for (;;) {
      const RowTile rows = cta.next_row_tile(slots);
      if (rows.is_end()) return;
      if (rows.is_any_end()) {
        if (T::kOverlapsTiles) load_values(pending);
        if (!cta.end_round(pass)) return;
        continue;
      }
      pass = cta.pass();
      const SequencePlace place = cta.place_of(rows);
      cta.done_with(rows);
      is_last_group = has_claimed = false;
      VisitedTile tile{}, next{};
      visit(tile);
      look_up(rows, place, tile);
      for (bool is_first = true;; is_first = false) {
        page = next_page;
        const bool has_next = visit(next);
        if (has_next) look_up(rows, place, next);
        load_tile(rows, place, tile, has_next ? kv_tile_of(next) : KvTile::none(), is_first,
                  pending);
        if (!has_next) break;
        tile = next;
      }
      if (!T::kOverlapsTiles) load_values(pending);
    }
  }

 private:
  /// The next kv tile, from the right; false behind the last. There is at least one.
  FOVEA_DEVICE_MEMBER bool visit(VisitedTile& tile) {
    if (group.visible == 0) {
      if (is_last_group) return false;
      open_group();
    }
    tile = take_tile<WalkOrder::falling>(group);
    // One tile is left, or none: what is in flight by now covers the time that a claim takes.
    if (is_last_group && !has_claimed && (group.visible & (group.visible - 1)) == 0) {
      if (cta.lane == 0) ptx::mbarrier_arrive(cta.barrier(L::kClaim, 0));
      has_claimed = true;
    }
    return true;
  }

  FOVEA_DEVICE_MEMBER KvTile kv_tile_of(VisitedTile tile) const {
    return KvTile::make(tile.idx, tile.is_full, pass);
  }

  FOVEA_DEVICE_MEMBER void open_group() {
    cta.await(cta.barrier(L::kGroupFull, groups.stage), groups.parity);
    const auto words = ptx::ld_shared<ptx::U32x4>(cta.smem + L::kGroupsOfTiles + 16 * groups.stage);
    cta.release(cta.barrier(L::kGroupEmpty, groups.stage));
    groups.advance();
    group = {static_cast<std::int32_t>(ptx::shfl_idx(words.x, 0)), ptx::shfl_idx(words.y, 0),
             ptx::shfl_idx(words.z, 0)};
    is_last_group = ptx::shfl_idx(words.w, 0) != 0;
  }

  /// Keys of this tile, values of the one before; with the first, the rows' queries, the first group's before anything
  /// else.
  FOVEA_DEVICE_MEMBER void load_tile(const RowTile& rows, const SequencePlace& place,
                                     VisitedTile tile, KvTile next, bool is_first,
                                     Pending& pending) {
    const std::int32_t kv_head = rows.q_head / cta.p.common.group;
    if (is_first) load_queries(rows, place, 0);
    cta.await(cta.barrier(L::kKEmpty, k.stage), k.parity);
    if (ptx::elect_one()) {
      ptx::st_shared(cta.kv_tile_at(k.stage), ptx::U32x2{kv_tile_of(tile).word, next.word});
      if constexpr (!spec.is_paged) {
        copy<typename T::KTile>(
            cta.k_at(k.stage), cta.p.k, cta.barrier(L::kKFull, k.stage),
            {0, first_row(place) + tile.idx * spec.tile_kv, kv_head, kv_batch(rows, place)},
            ptx::CachePolicy::evict_last);
      }
    }
    if constexpr (spec.is_paged)
      copy_pages<typename T::KTile>(cta.k_at(k.stage), cta.p.k, cta.barrier(L::kKFull, k.stage),
                                    {tile.idx, kv_head, page, 0});
    k.advance();
    if (is_first) {
      for (int group = 1; group < T::kGroups; ++group) load_queries(rows, place, group);
      q.advance();
    }
    if (pending.idx >= 0) load_values(pending);
    pending = {tile.idx, kv_head, spec.is_paged ? page : kv_batch(rows, place), first_row(place)};
    if constexpr (T::kClearsValues) num_keys = place.seqlen_kv - tile.idx * spec.tile_kv;
  }

  /// Of K and V in their tensor maps.
  FOVEA_DEVICE_MEMBER static std::int32_t kv_batch(const RowTile& rows,
                                                   const SequencePlace& place) {
    return spec.is_split ? place.kv_row : Cta<spec>::map_batch(rows);
  }
  FOVEA_DEVICE_MEMBER static std::int32_t first_row(const SequencePlace& place) {
    return spec.is_split ? 0 : place.kv_row;
  }

  /// Rows of Q that no box reaches: what lies there would look like NaN in the sums.
  FOVEA_DEVICE_MEMBER void clear_unused_rows() const {
    if constexpr (T::kBoxRows < 64) {
      constexpr int kChunks = spec.head_dim_qk / 8;
      for (int stage = 0; stage < T::kQStages; ++stage) {
        const typename T::QTile queries{cta.q_at(stage, 0)};
#pragma unroll 1
        for (int at = cta.lane; at < (64 - T::kBoxRows) * kChunks; at += 32)
          ptx::st_shared(queries.chunk(T::kBoxRows + at / kChunks, at % kChunks), ptx::U32x4{});
      }
      ptx::fence_proxy_async_shared_cta();
      ptx::sync_warp();
    }
  }

  FOVEA_DEVICE_MEMBER void load_queries(const RowTile& rows, const SequencePlace& place,
                                        int group) {
    const int i = q.stage * T::kGroups + group;
    cta.await(cta.barrier(L::kQEmpty, i), q.parity);
    if (!ptx::elect_one()) return;
    copy<typename T::QTile, T::kBoxRows>(
        cta.q_at(q.stage, group), cta.p.q, cta.barrier(L::kQFull, i),
        {0, place.q_row + rows.idx * T::kQueries + 64 * group, rows.q_head, cta.map_batch(rows)},
        ptx::CachePolicy::evict_first);
  }

  FOVEA_DEVICE_MEMBER void load_values(Pending& pending) {
    if (pending.idx < 0) return;
    cta.await(cta.barrier(L::kVEmpty, v.stage), v.parity);
    const SharedAddress full = cta.barrier(L::kVFull, v.stage);
    const bool is_cut = T::kClearsValues && num_keys < spec.tile_kv;
    if (is_cut || pass != Pass::all) {
      load_to_rewrite(pending, full, is_cut);
    } else {
      copy_values(pending, full);
    }
    v.advance();
    pending.idx = -1;
  }

  FOVEA_DEVICE_MEMBER void copy_values(const Pending& tile, SharedAddress full) const {
    if constexpr (spec.is_paged) {
      copy_pages<typename T::VTile>(cta.v_at(v.stage), cta.p.v, full, tile);
    } else if (ptx::elect_one()) {
      copy<typename T::VTile>(cta.v_at(v.stage), cta.p.v, full,
                              {0, tile.kv_row + tile.idx * spec.tile_kv, tile.kv_head, tile.batch},
                              ptx::CachePolicy::evict_last);
    }
  }

  /// Where the sequence ends inside the tile there may be NaN behind it, and 0 * NaN is not 0; nor is it in a pass over
  /// a row tile that is computed again.
  FOVEA_DEVICE_MEMBER void load_to_rewrite(const Pending& tile, SharedAddress full, bool is_cut) {
    const SharedAddress landed = cta.barrier(L::kVLanded, 0);
    copy_values(tile, landed);
    cta.await(landed, landings.parity);
    landings.advance();
    const typename T::VTile values{cta.v_at(v.stage)};
    if (is_cut) clear_behind_keys(values);
    if (pass != Pass::all) {
      ptx::sync_warp();
      rewrite_values<spec.element>(values, cta.lane, pass);
    }
    ptx::fence_proxy_async_shared_cta();
    cta.release(full);
  }

  /// Paged: as far as the box of the last key reaches, those behind it came as zeros.
  FOVEA_DEVICE_MEMBER void clear_behind_keys(const typename T::VTile& values) const {
    constexpr int kChunks = spec.head_dim_v / 8;
    const std::int32_t rows =
        spec.is_paged ? -num_keys & (cta.p.rows_per_box - 1) : spec.tile_kv - num_keys;
#pragma unroll 1
    for (int at = cta.lane; at < rows * kChunks; at += 32)
      ptx::st_shared(values.chunk(num_keys + at / kChunks, at % kChunks), ptx::U32x4{});
  }

  /// A box for each panel of 64 elements; what lies outside the tensor arrives as zeros.
  template <class Tile, int rows = Tile::kRows>
  FOVEA_DEVICE_MEMBER void copy(SharedAddress to, const TensorMapParam& map, SharedAddress full,
                                const std::int32_t (&at)[4], ptx::CachePolicy policy) const {
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes / Tile::kRows * rows);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t coordinates[4] = {64 * panel, at[1], at[2], at[3]};
      ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes, tensor_map(map),
                                        coordinates, full, policy);
    }
  }

  // ---- pages ----

  /// The page that this lane's box of a kv tile lies in; -1, which TMA takes for outside: there are no keys.
  FOVEA_DEVICE_MEMBER void look_up(const RowTile& rows, const SequencePlace& place,
                                   VisitedTile tile) {
    if constexpr (spec.is_paged) {
      const ForwardParams& c = cta.p.common;
      const std::int32_t row = cta.lane * cta.p.rows_per_box;
      const std::int32_t key = tile.idx * spec.tile_kv + row;
      next_page = -1;
      if (row >= spec.tile_kv || key >= place.seqlen_kv) return;
      const std::int64_t at = kv_batch(rows, place) * c.page_table_row_stride +
                              (key >> c.page_shift) * c.page_table.stride;
      // Of an i64 the low word: there are fewer than 2^31 pages.
      next_page = ptx::ld_global(static_cast<const std::int32_t*>(c.page_table.data) +
                                 (c.page_table.is_wide != 0 ? 2 * at : at));
    }
  }

  /// A box for each panel and each run of rows that lies in one page. Boxes are multiples of 8 rows, as the swizzle's
  /// pattern is.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy_pages(SharedAddress to, const TensorMapParam& map,
                                      SharedAddress full, const Pending& tile) const {
    const SharedAddress pages = cta.smem + L::kPages;
    if (cta.lane < L::kMostBoxes) ptx::st_shared(pages + 4 * cta.lane, tile.batch);
    ptx::sync_warp();
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
    const std::int32_t key = tile.idx * spec.tile_kv;
#pragma unroll 1
    for (std::int32_t row = 0, box = 0; row < spec.tile_kv; row += cta.p.rows_per_box, ++box) {
      const auto page = ptx::ld_shared<std::int32_t>(pages + 4 * box);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const std::int32_t coordinates[4] = {64 * panel, (key + row) & (cta.p.common.page_size - 1),
                                             tile.kv_head, page};
        ptx::cp_async_bulk_tensor_load<4>(to + panel * Tile::kPanelBytes + row * Tile::kSpan,
                                          tensor_map(map), coordinates, full,
                                          ptx::CachePolicy::evict_last);
      }
    }
  }
};

}  // namespace fovea::cuda::sm90
