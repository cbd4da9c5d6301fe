// Which units a CTA has; their queries and keys on the way into shared memory, by TMA. Read scores.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/latent/cta.cuh"
#include "sm90/split_finder.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::latent {

template <Sm90LatentSpec spec, class Mods>
struct Load {
  using L = Layout<spec>;
  using Tiles = typename WalkOf<Mods>::Type;
  const Cta<spec>& cta;
  Ring<L::kBuffers> buffers{1};
  Ring<L::kRecords> records{1};
  Ring<1> queries{1};
  ptx::CachePolicy policy = ptx::CachePolicy::evict_first;

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta) : cta(of_cta) {}

  FOVEA_DEVICE_MEMBER void run() {
    SplitFinder<spec, true> finder(cta.p.common);
    // Keys that other row tiles read too stay in the L2 cache for them.
    if (finder.row_tiles() > 1) policy = ptx::CachePolicy::evict_normal;
    for (std::int32_t idx = ptx::block_idx().x;; idx += ptx::grid_dim().x) {
      const Work work = finder.find(idx);
      if (work.is_nothing) {
        cta.post_unit({work, 0}, records);
        return;
      }
      load_unit(work);
    }
  }

 private:
  /// Where a box of keys lies.
  struct Place {
    std::int32_t row, page;
  };

  FOVEA_DEVICE_MEMBER void load_unit(const Work& work) {
    const TileSpan rows = span_of<spec>(work);
    const TileRange range{work.kv_begin / spec.tile_kv, ceil_div(work.kv_end, spec.tile_kv),
                          spec.tile_kv};
    Tiles tiles(rows, range, cta.p.common.captures);
    VisitedTile tile;
    bool is_there = tiles.next(tile);
    cta.post_unit({work, is_there ? 1U : 0U}, records);
    if (!is_there) return;
    Place place = look_up(work, tile);
    load_queries(work);
#pragma unroll 1
    while (is_there) {
      const VisitedTile now = tile;
      const Place now_at = place;
      is_there = tiles.next(tile);
      if (is_there) place = look_up(work, tile);  // while this one is waited for
      load_tile(work, now, now_at, !is_there);
      buffers.advance();
    }
  }

  FOVEA_DEVICE_MEMBER void load_queries(const Work& work) {
    constexpr std::uint32_t kBytes = L::kUsedRows * L::kElement.bytes * spec.head_dim_qk;
    cta.await(cta.barrier(L::kAt.q_empty, 0), queries.parity);
    queries.advance();
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.q_full, 0), kBytes);
#pragma unroll 1
    for (int panel = 0; panel < L::kPanels; ++panel) {
      const std::int32_t at[4] = {L::kElement.of_panel * panel, work.q_head, work.q_begin,
                                  static_cast<std::int32_t>(work.sequence.q_batch)};
      ptx::cp_async_bulk_tensor_load<4>(cta.queries().panel(panel), tensor_map(cta.p.q), at,
                                        cta.barrier(L::kAt.q_full, 0),
                                        ptx::CachePolicy::evict_first);
    }
  }

  /// The page is what the table holds, limited where it is used: doing so here would wait for the table. Lane i has the
  /// tile's box i.
  FOVEA_DEVICE_MEMBER Place look_up(const Work& work, VisitedTile tile) const {
    if constexpr (!spec.is_paged) return {0, 0};
    const ForwardParams& c = cta.p.common;
    const std::int32_t in_tile = cta.lane * cta.p.rows_per_box;
    const std::int32_t key = tile.idx * spec.tile_kv + in_tile;
    if (in_tile >= spec.tile_kv || key >= work.kv_end) return {0, 0};
    const std::int32_t entry = entry_of_row(c, key);
    return {key - entry * c.page_size,
            static_cast<std::int32_t>(page_entry(c, work.sequence.kv_batch, entry))};
  }

  FOVEA_DEVICE_MEMBER void load_tile(const Work& work, VisitedTile tile, const Place& place,
                                     bool is_last) const {
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_kv <= work.kv_end;
    cta.await(cta.barrier(L::kAt.empty, buffers.stage), buffers.parity);
    if (ptx::elect_one()) {
      ptx::st_shared(cta.word_of(buffers.stage), PostedTile::of(tile, is_last).word);
#pragma unroll
      for (int part = 0; part < L::kParts; ++part)
        ptx::mbarrier_arrive_expect_tx(cta.full(buffers.stage, part), L::KTile::kBytes / L::kParts);
    }
    ptx::sync_warp();
    if constexpr (spec.is_paged) {
#pragma unroll 1
      for (std::int32_t row = 0, box = 0; row < spec.tile_kv; row += cta.p.rows_per_box, ++box) {
        const std::int32_t in_page = ptx::shfl_idx(place.row, box);
        const auto page = static_cast<std::int32_t>(
            one_of(ptx::shfl_idx(place.page, box), cta.p.common.num_slots));
        // A box without keys gets page -1: TMA fills it with zeros.
        const bool has_keys = tile.idx * spec.tile_kv + row < work.kv_end;
        load_box(work, row, has_keys ? in_page : 0, has_keys ? page : -1);
      }
    } else {
      const auto row = static_cast<std::int32_t>(work.sequence.kv_row) + tile.idx * spec.tile_kv;
      load_box(work, 0, row, static_cast<std::int32_t>(work.sequence.kv_batch));
    }
  }

  /// Into the tile's rows from `to_row` on: the panels of a part in one box, or where a box has not all
  /// rows of the tile, a box for each. What lies outside the tensor arrives as zeros.
  FOVEA_DEVICE_MEMBER void load_box(const Work& work, int to_row, std::int32_t row,
                                    std::int32_t batch) const {
    const bool by_panels = spec.is_paged && cta.p.rows_per_box < spec.tile_kv;
    if (!ptx::elect_one()) return;
#pragma unroll 1
    for (int panel = 0; panel < L::kPanels; panel += by_panels ? 1 : L::kPanelsOfPart) {
      const std::int32_t at[5] = {by_panels ? L::kElement.of_panel * panel : 0, row,
                                  by_panels ? 0 : panel, work.kv_head, batch};
      ptx::cp_async_bulk_tensor_load<5>(cta.keys(buffers.stage).panel(panel) + 128 * to_row,
                                        tensor_map(cta.p.k), at,
                                        cta.full(buffers.stage, panel / L::kPanelsOfPart), policy);
    }
  }
};

}  // namespace fovea::cuda::sm90::latent
