// All that sm90/attention_backward_wide loads: one warp. Read pairs.cuh next.
#pragma once

#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/wide/cta.cuh"

namespace fovea::cuda::sm90 {

/// OwnerWalk whose parts lie outside of it: what points into itself stays in memory.
template <Sm90WideBackwardSpec spec, class Mods>
struct WideWalk {
  using Tiles =
      TileWalk<Mods, WalkOrder::rising, spec.owns_keys ? WalkAxis::queries : WalkAxis::keys>;

  const WideCta<spec>& cta;
  TileSpan& span;
  Tiles& tiles;
  const std::int32_t last_head;

  /// idx -1: there are no more. Full only where all of its rows and all owned ones exist, too.
  FOVEA_DEVICE_MEMBER WalkedTile next() const {
    for (;;) {
      VisitedTile tile;
      if (tiles.next(tile)) {
        const bool is_cut = (tile.idx + 1) * spec.tile_walked > cta.walked_length() ||
                            cta.owned.begin + spec.tile_owned > cta.owned_length();
        return {tile.idx, span.q_head_begin, tile.is_full && !is_cut};
      }
      if (span.q_head_begin == last_head) return {-1, last_head, false};
      ++span.q_head_begin;
      ++span.q_head_end;
      tiles.restart();
    }
  }
};

/// Owned rows once, then those of the other side, tile by tile.
template <Sm90WideBackwardSpec spec, class Mods>
struct WideLoad {
  using T = WideTraits<spec>;
  using Walk = WideWalk<spec, Mods>;

  const WideCta<spec>& cta;
  Ring<spec.stages> stages{1};
  Ring<spec.v_stages> v_stages{1};

  FOVEA_DEVICE_MEMBER explicit WideLoad(const WideCta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    const ForwardParams& f = cta.p.common.forward;
    TileSpan span = OwnerWalk<Mods, spec.owns_keys>::span_of(f, cta.owned, spec.tile_owned);
    typename Walk::Tiles tiles(span, {0, 0x7fffffff, spec.tile_walked}, f.captures);
    const std::int32_t head = cta.owned.head;
    const Walk walk{cta, span, tiles, spec.owns_keys ? (head + 1) * f.group - 1 : head};
    WalkedTile tile = walk.next();
    if (tile.idx < 0) {
      if (cta.lane == 0) {
        post(0, PostedTile::none());
        ptx::mbarrier_arrive(cta.barrier(T::kAt.owned_qk_full, 0));
        ptx::mbarrier_arrive(cta.barrier(T::kAt.owned_v_full, 0));
      }
      return;
    }
    for (int i = 0; tile.idx >= 0; ++i) {
      const WalkedTile next = walk.next();
      if (cta.lane == 0) post(i, PostedTile::make(tile, next.idx < 0));
      ptx::sync_warp();
      if (i == 0) load_owned_qk();
      // The side that is free first: dout before q, k before v.
      if constexpr (spec.owns_keys) {
        if (i == 0) load_owned_v();
        load_v(tile);
        load_qk(tile);
      } else {
        load_qk(tile);
        if (i == 0) load_owned_v();
        load_v(tile);
      }
      tile = next;
    }
  }

 private:
  FOVEA_DEVICE_MEMBER void post(int i, const PostedTile& tile) const {
    ptx::st_shared(cta.word_at(i), ptx::U32x2{tile.word, static_cast<std::uint32_t>(tile.q_head)});
  }

  FOVEA_DEVICE_MEMBER void load_owned_qk() const {
    if (!ptx::elect_one()) return;
    const SharedAddress full = cta.barrier(T::kAt.owned_qk_full, 0);
    constexpr int kTiles = spec.tile_owned / T::kRows;
    ptx::mbarrier_arrive_expect_tx(full, kTiles * T::QkTile::kBytes);
    for (int i = 0; i < kTiles; ++i)
      copy(cta.owned_qk(i), spec.owns_keys ? cta.p.k : cta.p.q, full,
           cta.owned.begin + i * T::kRows, cta.owned.head, spec.owns_keys,
           ptx::CachePolicy::evict_first);
  }

  FOVEA_DEVICE_MEMBER void load_owned_v() const {
    if (!ptx::elect_one()) return;
    const SharedAddress full = cta.barrier(T::kAt.owned_v_full, 0);
    constexpr int kTiles = spec.tile_owned / T::kRows;
    ptx::mbarrier_arrive_expect_tx(full, kTiles * T::VTile::kBytes);
    for (int i = 0; i < kTiles; ++i)
      copy(cta.owned_v(i), spec.owns_keys ? cta.p.v : cta.p.dout, full,
           cta.owned.begin + i * T::kRows, cta.owned.head, spec.owns_keys,
           ptx::CachePolicy::evict_first);
  }

  FOVEA_DEVICE_MEMBER void load_qk(const WalkedTile& tile) {
    cta.await(cta.barrier(T::kAt.qk_empty, stages.stage), stages.parity);
    if (ptx::elect_one()) {
      const SharedAddress full = cta.barrier(T::kAt.qk_full, stages.stage);
      const std::int32_t row = tile.idx * T::kRows;
      ptx::mbarrier_arrive_expect_tx(
          full, T::QkTile::kBytes + (spec.owns_keys ? sm90_wide_log_sum_bytes(spec) : 0));
      copy(cta.qk(stages.stage), spec.owns_keys ? cta.p.q : cta.p.k, full, row, walked_head(tile),
           !spec.owns_keys, ptx::CachePolicy::evict_normal);
      if constexpr (spec.owns_keys) {
        const RowStatistics& rows = cta.p.common.rows;
        const SharedAddress to = cta.log_sum_at(stages.stage);
        copy_rows(to, rows.log_sum, tile, full);
        if constexpr (spec.has_origins) copy_rows(to + 4 * T::kRows, rows.origin, tile, full);
      }
    }
    ptx::sync_warp();
    stages.advance();
  }

  FOVEA_DEVICE_MEMBER void load_v(const WalkedTile& tile) {
    cta.await(cta.barrier(T::kAt.v_empty, v_stages.stage), v_stages.parity);
    if (ptx::elect_one()) {
      const SharedAddress full = cta.barrier(T::kAt.v_full, v_stages.stage);
      ptx::mbarrier_arrive_expect_tx(full, T::VTile::kBytes + (spec.owns_keys ? 4 * T::kRows : 0));
      copy(cta.v(v_stages.stage), spec.owns_keys ? cta.p.dout : cta.p.v, full, tile.idx * T::kRows,
           walked_head(tile), !spec.owns_keys, ptx::CachePolicy::evict_normal);
      if constexpr (spec.owns_keys)
        copy_rows(cta.delta_at(v_stages.stage), cta.p.common.rows.delta, tile, full);
    }
    ptx::sync_warp();
    v_stages.advance();
  }

  FOVEA_DEVICE_MEMBER std::int32_t walked_head(const WalkedTile& tile) const {
    return spec.owns_keys ? tile.q_head : cta.kv_head();
  }

  /// A box for each panel of 64 elements of 64 rows; what lies outside of the tensor arrives as zeros.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void copy(const Tile& to, const TensorMapParam& map, SharedAddress full,
                                std::int32_t row, std::int32_t head, bool are_keys,
                                ptx::CachePolicy policy) const {
    const Sequence& s = cta.owned.sequence;
    const auto first = static_cast<std::int32_t>(are_keys ? s.kv_row : s.q_row);
    const auto batch = static_cast<std::int32_t>(are_keys ? s.kv_batch : s.q_batch);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const std::int32_t at[4] = {64 * panel, first + row, head, batch};
      ptx::cp_async_bulk_tensor_load<4>(to.panel(panel), tensor_map(map), at, full, policy);
    }
  }

  /// A float of each walked query. Padding makes tiles whole.
  FOVEA_DEVICE_MEMBER void copy_rows(SharedAddress to, const float* rows, const WalkedTile& tile,
                                     SharedAddress full) const {
    const std::int64_t at =
        statistics_at<spec.is_varlen>(cta.p.common.rows, cta.owned.sequence, tile.q_head) +
        tile.idx * T::kRows;
    ptx::cp_async_bulk_load(to, rows + at, 4 * T::kRows, full, ptx::CachePolicy::evict_normal);
  }
};

}  // namespace fovea::cuda::sm90
