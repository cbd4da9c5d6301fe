// Which splits a CTA computes, and their keys and values on the way into shared memory: by TMA, each of two warps its
// own slots. Read compute.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/cta.cuh"
#include "sm90/split_finder.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm90::decoding {

/// Where boxes of keys lie in pages: 32 at a time are looked up, and 32 ahead of them.
template <Sm90DecodeSpec spec>
class PageWindow {
 public:
  struct Place {
    std::int32_t row, page;
  };

  FOVEA_DEVICE_MEMBER PageWindow(const Sm90DecodeParams& p, const Work& work)
      : p_(p), work_(work), begin_(work.kv_begin / p.rows_per_box) {
    now_ = look_up(begin_);
    next_ = look_up(begin_ + 32);
  }

  /// Of the box that begins at this key; keys that are asked for rise.
  FOVEA_DEVICE_MEMBER Place place_of(std::int32_t key) {
    const std::int32_t box = key / p_.rows_per_box;
    while (box >= begin_ + 32) {
      begin_ += 32;
      now_ = next_;
      next_ = look_up(begin_ + 32);
    }
    const Place found{ptx::shfl_idx(now_.row, box - begin_),
                      ptx::shfl_idx(now_.page, box - begin_)};
    // A box without keys gets page -1: TMA fills it with zeros.
    if (key >= work_.kv_end) return {0, -1};
    return {found.row, static_cast<std::int32_t>(one_of(found.page, p_.common.num_slots))};
  }

 private:
  /// The page is what the table holds, limited where it is used: doing so here would wait for the table.
  FOVEA_DEVICE_MEMBER Place look_up(std::int32_t first_box) const {
    const ForwardParams& c = p_.common;
    const std::int32_t key = (first_box + ptx::lane_idx()) * p_.rows_per_box;
    if (key >= work_.kv_end) return {0, 0};
    const std::int32_t entry = c.page_shift >= 0 ? key >> c.page_shift : key / c.page_size;
    return {key - entry * c.page_size,
            static_cast<std::int32_t>(page_entry(c, work_.sequence.kv_batch, entry))};
  }

  const Sm90DecodeParams& p_;
  const Work& work_;
  std::int32_t begin_;
  Place now_, next_;
};

template <Sm90DecodeSpec spec, class Mods>
struct Load {
  using L = Layout<spec>;
  using T = typename L::T;
  using Tiles = typename team::WalkOf<Mods>::Type;
  const Cta<spec>& cta;
  const int loader;
  Ring<L::kSlots> slots{1};
  Ring<L::kRecords> records{1};
  std::uint32_t last_clock;  // of the last slice

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta)
      : cta(of_cta),
        loader(of_cta.warp - L::kReaders),
        last_clock(ptx::clock() - of_cta.p.clocks_per_slice) {}

  FOVEA_DEVICE_MEMBER void run() {
    SplitFinder<spec, false> finder(cta.p.common);
    for (std::int32_t idx = ptx::block_idx().x;; idx += ptx::grid_dim().x) {
      const Work work = finder.find(idx);
      if (loader == 0) cta.post_work(work, records);  // both find the same
      if (work.is_nothing) return;
      load_split(work);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER void load_split(const Work& work) {
    const team::Team<L::kWarpSpec> team{cta.p.common, work, cta.smem, 0, cta.lane};
    const TileSpan rows = span_of<L::kWarpSpec>(work);
    Tiles tiles = team::start_tiles<Tiles>(team, rows);
    if constexpr (spec.is_paged) {
      PageWindow<spec> pages(cta.p, work);
#pragma unroll 1
      for (VisitedTile slice; tiles.next(slice); slots.advance())
        if (is_mine()) load_boxes(work, slice, pages);
    } else {
#pragma unroll 1
      for (VisitedTile slice; tiles.next(slice); slots.advance())
        if (is_mine()) load_slice(work, slice);
    }
  }

  FOVEA_DEVICE_MEMBER bool is_mine() const { return slots.stage % L::kLoaders == loader; }

  /// Slices asked for as fast as slots become free come in bursts, of all SMs at once: memory then gives a tenth less.
  FOVEA_DEVICE_MEMBER void keep_pace() {
    std::uint32_t now = ptx::clock();
    while (now - last_clock < cta.p.clocks_per_slice) now = ptx::clock();
    last_clock = now;
  }

  FOVEA_DEVICE_MEMBER void load_slice(const Work& work, VisitedTile slice) {
    keep_pace();
    cta.await(cta.barrier(L::kAt.empty, slots.stage), slots.parity);
    if (!ptx::elect_one()) return;
    ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.full, slots.stage), L::kAt.slot_bytes);
    const auto row = static_cast<std::int32_t>(work.sequence.kv_row) + slice.idx * spec.tile_kv;
    load_box(work, 0, row, static_cast<std::int32_t>(work.sequence.kv_batch));
  }

  FOVEA_DEVICE_MEMBER void load_boxes(const Work& work, VisitedTile slice,
                                      PageWindow<spec>& pages) const {
    cta.await(cta.barrier(L::kAt.empty, slots.stage), slots.parity);
#pragma unroll 1
    for (std::int32_t row = 0; row < spec.tile_kv; row += cta.p.rows_per_box) {
      const auto place = pages.place_of(slice.idx * spec.tile_kv + row);
      if (!ptx::elect_one()) continue;
      if (row == 0)
        ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.full, slots.stage), L::kAt.slot_bytes);
      load_box(work, row, place.row, place.page);
    }
  }

  /// Rows of keys and of values, into the slot's rows from `to_row` on; what lies outside the tensor arrives as zeros.
  FOVEA_DEVICE_MEMBER void load_box(const Work& work, int to_row, std::int32_t row,
                                    std::int32_t batch) const {
    load_panels(cta.keys_at(slots.stage), to_row, cta.p.k, row, work.kv_head, batch);
    load_panels(cta.values_at(slots.stage), to_row, cta.p.v, row, work.kv_head, batch);
  }

  /// All panels in one box, or a box for each.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void load_panels(const Tile& to, int to_row, const TensorMapParam& map,
                                       std::int32_t row, std::int32_t head,
                                       std::int32_t batch) const {
    const bool by_panels = sm90_decode_loads_panels(spec, cta.p.rows_per_box);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      if (panel > 0 && !by_panels) return;
      const std::int32_t at[5] = {T::kElement.of_panel * panel, row, 0, head, batch};
      ptx::cp_async_bulk_tensor_load<5>(to.panel(panel) + Tile::kRowPitch * to_row, tensor_map(map),
                                        at, cta.barrier(L::kAt.full, slots.stage),
                                        ptx::CachePolicy::evict_first);
    }
  }
};

}  // namespace fovea::cuda::sm90::decoding
