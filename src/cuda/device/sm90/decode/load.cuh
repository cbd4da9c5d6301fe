// Which splits a CTA computes, and their keys and values on the way into shared memory: by TMA, each of two warps into
// buffers of its own; scales of codes by cp.async (scales.cuh). Read compute.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "sm90/decode/box_walk.cuh"
#include "sm90/decode/cluster.cuh"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/queries.cuh"
#include "sm90/decode/scales.cuh"
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
      : p_(p),
        work_(work),
        shift_(lowest_bit(static_cast<std::uint32_t>(p.rows_per_box))),
        begin_(work.kv_begin >> shift_) {
    now_ = look_up(begin_);
    next_ = look_up(begin_ + 32);
  }

  /// Of the box that begins at this key; keys that are asked for rise.
  FOVEA_DEVICE_MEMBER Place place_of(std::int32_t key) {
    const std::int32_t box = key >> shift_;
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

  /// Of this lane's key, below kv_end, among those of the box that was asked for last: it lies in one window.
  FOVEA_DEVICE_MEMBER KvPlace place_of_each(std::int32_t key) const {
    const std::int32_t box = key >> shift_;
    const std::int32_t row = ptx::shfl_idx(now_.row, box - begin_);
    const std::int32_t page = ptx::shfl_idx(now_.page, box - begin_);
    return {one_of(page, p_.common.num_slots), row + (key & p_.rows_per_box - 1)};
  }

 private:
  /// The page is what the table holds, limited where it is used: doing so here would wait for the table.
  FOVEA_DEVICE_MEMBER Place look_up(std::int32_t first_box) const {
    const ForwardParams& c = p_.common;
    const std::int32_t key = first_box + ptx::lane_idx() << shift_;
    if (key >= work_.kv_end) return {0, 0};
    const std::int32_t entry = entry_of_row(c, key);
    return {key - entry * c.page_size,
            static_cast<std::int32_t>(page_entry(c, work_.sequence.kv_batch, entry))};
  }

  const Sm90DecodeParams& p_;
  const Work& work_;
  const std::int32_t shift_;  // of rows_per_box, which divides a power of two of keys
  std::int32_t begin_;
  Place now_, next_;
};

/// Where keys of a sequence lie that is contiguous.
struct SequencePlaces {
  const Sequence& sequence;

  FOVEA_DEVICE_MEMBER KvPlace place_of_each(std::int32_t key) const {
    return {sequence.kv_batch, static_cast<std::int32_t>(sequence.kv_row) + key};
  }
};

template <Sm90DecodeSpec spec, class Mods>
struct Load {
  using L = Layout<spec>;
  using T = typename L::T;
  using Walk = BoxWalk<spec, Mods>;
  static constexpr int kKeysOfBox = L::kSlices * spec.tile_kv;
  const Cta<spec>& cta;
  const int loader;
  Ring<L::kStages> boxes{1};
  Ring<L::kRecords> records{1};

  FOVEA_DEVICE_MEMBER explicit Load(const Cta<spec>& of_cta)
      : cta(of_cta), loader(of_cta.warp - L::kReaders), policy_(of_cta.policy_of_keys()) {}

  FOVEA_DEVICE_MEMBER void run() {
    if constexpr (is_clustered(spec)) {
      const Work work = work_of_cluster<spec>(cta.p.common);
      post({work, Unit::split});
      if (!work.is_nothing) load_split(work);
    } else {
      load_units();
    }
  }

 private:
  FOVEA_DEVICE_MEMBER void load_units() {
    SplitFinder<spec, false, spec.takes_groups> finder(cta.p.common);
    if constexpr (spec.takes_groups) finder.count_keys(cta.p.tiles_of_cta);
    for (std::int32_t idx = ptx::block_idx().x;; idx += ptx::grid_dim().x) {
      Work work = finder.find(idx);
      post({work, finder.unit()});
      if (work.is_nothing) return;  // who ends lets the combine kernel start, too
      const bool is_first = idx == ptx::block_idx().x;
      if (is_first) load_first_queries(work);
      load_split(work);
      // Sooner the combine kernel's warps would wait for instructions at the same time. Beside groups there is time.
      if (!spec.takes_groups && is_first) ptx::griddepcontrol_launch_dependents();
      if constexpr (spec.takes_groups) load_rest(work, finder.unit());
    }
  }

  /// Both loading warps find the same splits.
  FOVEA_DEVICE_MEMBER void post(const Posted& split) {
    if (loader == 0) cta.post(split, records);
  }

  /// By the one that posts nothing: it is the first to ask for anything.
  FOVEA_DEVICE_MEMBER void load_first_queries(const Work& work) const {
    if constexpr (L::kQueryLoaders > 0)
      if (loader == L::kLoaders - 1 && ptx::elect_one()) QueryBoxes<spec>(cta, work).load();
  }

  /// Of the unit.
  FOVEA_DEVICE_MEMBER void load_rest(Work& work, Unit unit) {
    if (unit == Unit::split) return;
#pragma unroll 1
    while (!ends_unit(work, unit)) {
      take_split<spec>(work, work.split + 1);
      post({work, unit});
      load_split(work);
    }
  }

  FOVEA_DEVICE_MEMBER void load_split(const Work& work) {
    const TileSpan rows = span_of<L::kWarpSpec>(work);
    Walk walk(cta, work, rows);
    if constexpr (spec.is_paged) {
      PageWindow<spec> pages(cta.p, work);
#pragma unroll 1
      for (VisitedBox box; walk.next(box); boxes.advance()) {
        if (!is_mine()) continue;
        if constexpr (multiplies_by_wgmma(spec)) {
          load_in_turn([&](bool is_of_values) { load_pages_of(work, box, pages, is_of_values); });
        } else {
          load_pages(work, box, pages);
        }
      }
    } else {
#pragma unroll 1
      for (VisitedBox box; walk.next(box); boxes.advance()) {
        if (!is_mine()) continue;
        if constexpr (multiplies_by_wgmma(spec)) {
          load_in_turn([&](bool is_of_values) { load_tile(work, box, is_of_values); });
        } else {
          load_box(work, box);
        }
      }
    }
  }

  /// For warpgroups: keys make room for the next ones as soon as they are multiplied, values later.
  template <class LoadTile>
  FOVEA_DEVICE_MEMBER void load_in_turn(const LoadTile& load) const {
    cta.await(cta.barrier(L::kAt.empty, boxes.stage), boxes.parity);
    load(false);
    cta.await(cta.barrier(L::kAt.empty_values, boxes.stage), boxes.parity);
    load(true);
  }

  FOVEA_DEVICE_MEMBER void expect(bool is_values) const {
    ptx::mbarrier_arrive_expect_tx(
        barrier_of(is_values),
        static_cast<std::uint32_t>(is_values ? L::VTile::kBytes : L::KTile::kBytes));
  }
  FOVEA_DEVICE_MEMBER SharedAddress barrier_of(bool is_values) const {
    return cta.barrier(is_values && multiplies_by_wgmma(spec) ? L::kAt.full_values : L::kAt.full,
                       boxes.stage);
  }

  FOVEA_DEVICE_MEMBER void load_tile(const Work& work, const VisitedBox& box,
                                     bool is_values) const {
    if (!ptx::elect_one()) return;
    expect(is_values);
    load_rows_of(work, 0,
                 static_cast<std::int32_t>(work.sequence.kv_row) + box.first * spec.tile_kv,
                 static_cast<std::int32_t>(work.sequence.kv_batch), is_values);
  }

  FOVEA_DEVICE_MEMBER void load_pages_of(const Work& work, const VisitedBox& box,
                                         PageWindow<spec>& pages, bool is_values) const {
    for_each_page(work, box, pages, [&](std::int32_t row, const auto& place) {
      if (row == 0) expect(is_values);
      load_rows_of(work, row, place.row, place.page, is_values);
    });
  }

  FOVEA_DEVICE_MEMBER bool is_mine() const { return boxes.stage % L::kLoaders == loader; }

  /// Scales last: nobody waits for so few bytes if they are asked for behind those of keys.
  FOVEA_DEVICE_MEMBER void load_box(const Work& work, const VisitedBox& box) const {
    cta.await(cta.barrier(L::kAt.empty, boxes.stage), boxes.parity);
    if (ptx::elect_one()) load_slices(work, box);
    if constexpr (spec.has_codes()) load_scales(work, box, SequencePlaces{work.sequence});
  }

  /// All slices in one box, or each that some row sees. By one lane.
  FOVEA_DEVICE_MEMBER void load_slices(const Work& work, const VisitedBox& box) const {
    const auto row = static_cast<std::int32_t>(work.sequence.kv_row) + box.first * spec.tile_kv;
    const auto batch = static_cast<std::int32_t>(work.sequence.kv_batch);
    if (L::kSlices == 1 || box.visible == Walk::kAll) {
      ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.full, boxes.stage), L::kAt.box_bytes);
      load_rows(work, 0, row, batch);
      return;
    }
    int num_slices = 0;
#pragma unroll
    for (int i = 0; i < L::kSlices; ++i) num_slices += box.sees(i) ? 1 : 0;
    ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.full, boxes.stage),
                                   num_slices * L::kAt.slice_bytes);
#pragma unroll 1
    for (int i = 0; i < L::kSlices; ++i) {
      if (!box.sees(i)) continue;
      const int from = i * spec.tile_kv;
      load_panels(cta.keys_at(boxes.stage), from, cta.p.k_slice, row + from, work.kv_head, batch,
                  true, barrier_of(false));
      load_panels(cta.values_at(boxes.stage), from, cta.p.v_slice, row + from, work.kv_head, batch,
                  true, barrier_of(true));
    }
  }

  /// load(row of the box, where it lies), by one lane.
  template <class LoadPage>
  FOVEA_DEVICE_MEMBER void for_each_page(const Work& work, const VisitedBox& box,
                                         PageWindow<spec>& pages, const LoadPage& load) const {
#pragma unroll 1
    for (std::int32_t row = 0; row < kKeysOfBox; row += cta.p.rows_per_box) {
      const auto place = pages.place_of(box.first * spec.tile_kv + row);
      if (ptx::elect_one()) load(row, place);
    }
  }

  FOVEA_DEVICE_MEMBER void load_pages(const Work& work, const VisitedBox& box,
                                      PageWindow<spec>& pages) const {
    cta.await(cta.barrier(L::kAt.empty, boxes.stage), boxes.parity);
    for_each_page(work, box, pages, [&](std::int32_t row, const auto& place) {
      if (row == 0)
        ptx::mbarrier_arrive_expect_tx(cta.barrier(L::kAt.full, boxes.stage), L::kAt.box_bytes);
      load_rows(work, row, place.row, place.page);
    });
    if constexpr (spec.has_codes()) load_scales(work, box, pages);
  }

  /// Of all keys of a box, a lane's one after the other. Behind the last key it is that key's: what is loaded twice is
  /// hidden. places: of pages, or of the sequence.
  template <class Places>
  FOVEA_DEVICE_MEMBER void load_scales(const Work& work, const VisitedBox& box,
                                       const Places& places) const {
    const ScalesOfHead<spec> scales(cta, work);
    const std::int32_t first = box.first * spec.tile_kv;
#pragma unroll
    for (int i = 0; i < kKeysOfBox; i += 32) {
      const std::int32_t key = least(first + i + cta.lane, work.kv_end - 1);
      scales.load(boxes.stage, i + cta.lane, places.place_of_each(key));
    }
    scales.arrive(boxes.stage);
  }

  /// Rows of keys and of values, into the buffer's rows from `to_row` on; what lies outside the tensor arrives as
  /// zeros.
  FOVEA_DEVICE_MEMBER void load_rows(const Work& work, int to_row, std::int32_t row,
                                     std::int32_t batch) const {
    load_rows_of(work, to_row, row, batch, false);
    load_rows_of(work, to_row, row, batch, true);
  }

  FOVEA_DEVICE_MEMBER void load_rows_of(const Work& work, int to_row, std::int32_t row,
                                        std::int32_t batch, bool is_values) const {
    const bool by_panels = sm90_decode_loads_panels(spec, cta.p.rows_per_box);
    if (is_values) {
      load_panels(cta.values_at(boxes.stage), to_row, cta.p.v, row, work.kv_head, batch, by_panels,
                  barrier_of(true));
    } else {
      load_panels(cta.keys_at(boxes.stage), to_row, cta.p.k, row, work.kv_head, batch, by_panels,
                  barrier_of(false));
    }
  }

  /// All panels in one box, or a box for each.
  template <class Tile>
  FOVEA_DEVICE_MEMBER void load_panels(const Tile& to, int to_row, const TensorMapParam& map,
                                       std::int32_t row, std::int32_t head, std::int32_t batch,
                                       bool by_panels, SharedAddress barrier) const {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      if (panel > 0 && !by_panels) return;
      const std::int32_t at[5] = {T::kElement.of_panel * panel, row, 0, head, batch};
      ptx::cp_async_bulk_tensor_load<5>(to.panel(panel) + Tile::kRowPitch * to_row, tensor_map(map),
                                        at, barrier, policy_);
    }
  }

  const ptx::CachePolicy policy_;
};

}  // namespace fovea::cuda::sm90::decoding
