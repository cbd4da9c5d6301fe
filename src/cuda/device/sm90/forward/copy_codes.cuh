// Keys and values of a cache of codes into shared memory, where they are numbers of the queries' 16 bits: by threads,
// for codes become numbers in registers. Queries are copied as copy_cp_async.cuh does it. Read load.cuh for the order.
//
//   k = scale_k code_k,  v = scale_v code_v       rounded to q's dtype, as sm80/attention_coded has it
//
// A warpgroup of its own has a lane for each of the 128 keys of a tile: it finds where the row begins, in a slot or a
// page, and its scale. Four lanes copy 64 codes of a row, so eight rows are a step, and four steps are a warp's part.
//
// Codes land in shared memory by cp.async, each where the lane that asked for it will read it, so that nothing that is
// under way takes registers, and nobody waits for others. As soon as a tile's keys have become numbers those of the
// next one are asked for, and likewise values:
//
//   keys i      | wait, convert | ask keys i+1
//   values i-1                               | wait, convert | ask values i
//
// Bound: issue slots. 5.5 instructions for two codes of int8 and 6 of e4m3, of which a kv tile of head_dim 128 has
// 16,384, on the four schedulers that computing warps issue on, too.
#pragma once

#include "common/codes.cuh"
#include "common/row_addresses.cuh"
#include "common/scaled_codes.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/copy_cp_async.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// A warp's 32 rows of a tile, on their way.
template <auto spec, Codes codes, class Tile>
class RowsOfCodes {
  static constexpr int kLanesOfRow = 4, kRowsOfStep = 32 / kLanesOfRow;
  static constexpr int kSteps = 32 / kRowsOfStep;
  static constexpr int kCodes = 16;  // that a lane copies at once: two chunks of the tile
  static constexpr int kPanelCodes = kLanesOfRow * kCodes;
  static constexpr int kStepsAtOnce = Tile::kPanels == 1 ? kSteps : 1;
  static constexpr int kStepBytes = 32 * kCodes, kPanelBytes = kSteps * kStepBytes;  // landed
  static_assert(Tile::kSpan == 2 * kPanelCodes, "panels are 64 numbers wide");

 public:
  static constexpr int kBytes = 32 * kPanelCodes * Tile::kPanels;  // where they land

  FOVEA_DEVICE_MEMBER RowsOfCodes(int lane, SharedAddress landing)
      : lane_(lane), landing_(landing + kCodes * lane) {}

  /// Those that do not exist become zeros, whatever lies there, and whatever their scale.
  FOVEA_DEVICE_MEMBER void ask(const Cta<spec>& cta, const BshdParam& t, const ScaleParam& scale,
                               const KvRows& kv, std::int32_t head_dim) {
    const std::int32_t mine = 32 * cta.loader() + lane_;
    const bool exists = mine < kv.num_keys;
    const char* from = static_cast<const char*>(t.data);
    scale_ = 0;
    if (exists) {
      const KvPlace place = place_of(cta.p.common, kv, kv.first_row + kv.idx * spec.tile_kv + mine);
      from += place.in(t, kv.kv_head);
      scale_ = ptx::ld_global(scale_at(scale, kv.sequence, place.batch, place.row, kv.kv_head));
    }
    const RowAddresses rows(from, exists);
    const int first = kCodes * (lane_ % kLanesOfRow);
    SharedAddress to = landing_;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int row = kRowsOfStep * step + lane_ / kLanesOfRow;
      const char* const at = rows.at(row) + first;
      const bool is_there = rows.exists(row);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel)
        ptx::cp_async_16_or_zero(to + panel * kPanelBytes, at + kPanelCodes * panel,
                                 is_there && kPanelCodes * panel + first < head_dim);
      to += kStepBytes;
    }
  }

  /// What has landed, as numbers.
  FOVEA_DEVICE_MEMBER void convert(const Tile& to, int loader) const {
    if constexpr (codes == Codes::int8) {
      if (ptx::vote_any(!Int8TimesScale::takes(scale_)))
        convert_by<CodesTimesScale<codes>>(to, loader);
      else
        convert_by<Int8TimesScale>(to, loader);
    } else {
      convert_by<CodesTimesScale<codes>>(to, loader);
    }
  }

 private:
  /// Of one panel a step is too short for what is under way (an H200: 10 % of a call); of two it makes no difference.
  template <class Numbers>
  FOVEA_DEVICE_MEMBER void convert_by(const Tile& to, int loader) const {
    SharedAddress at = to.chunk(32 * loader + lane_ / kLanesOfRow, 2 * (lane_ % kLanesOfRow));
    SharedAddress from = landing_;
    ptx::U32x4 next = ptx::ld_shared<ptx::U32x4>(from);
#pragma unroll kStepsAtOnce
    for (int step = 0; step < kSteps; ++step) {
      const Numbers numbers(ptx::shfl_idx(scale_, kRowsOfStep * step + lane_ / kLanesOfRow));
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const ptx::U32x4 four = next;  // the next ones are on their way before these are converted
        if (panel + 1 < Tile::kPanels)
          next = ptx::ld_shared<ptx::U32x4>(from + (panel + 1) * kPanelBytes);
        else if (step + 1 < kSteps)
          next = ptx::ld_shared<ptx::U32x4>(from + kStepBytes);
        const SharedAddress of_panel = at + panel * Tile::kPanelBytes;
        ptx::st_shared(of_panel, eight_numbers<spec.element>(numbers, four.x, four.y));
        ptx::st_shared(of_panel ^ 16U, eight_numbers<spec.element>(numbers, four.z, four.w));
      }
      from += kStepBytes;
      at += kRowsOfStep * Tile::kSpan;  // eight rows on the swizzle is the same
    }
  }

  /// Paged: kv.batch is the page of this lane's row.
  FOVEA_DEVICE_MEMBER static KvPlace place_of(const ForwardParams& c, const KvRows& kv,
                                              std::int32_t row) {
    if constexpr (!spec.is_paged) return {kv.batch, row};
    return {kv.batch, row - entry_of_row(c, row) * c.page_size};
  }

  const int lane_;
  const SharedAddress landing_;
  float scale_ = 0;  // of this lane's row
};

template <auto spec>
class CodeCopies {
 public:
  using T = Traits<spec>;

  FOVEA_DEVICE_MEMBER explicit CodeCopies(const Cta<spec>& of_cta)
      : cta_(of_cta),
        copies_(of_cta),
        keys_(of_cta.lane, of_cta.smem + T::kAt.codes + of_cta.loader() * Keys::kBytes),
        values_(of_cta.lane, of_cta.smem + T::kAt.codes + T::kLoaders * Keys::kBytes +
                                 of_cta.loader() * Values::kBytes) {}

  FOVEA_DEVICE_MEMBER void clear_unused_rows() const {}
  FOVEA_DEVICE_MEMBER void before_wait(SharedAddress barrier, std::uint32_t parity) {
    copies_.before_wait(barrier, parity);
  }
  FOVEA_DEVICE_MEMBER void finish() { copies_.finish(); }

  /// The page of this lane's row of a kv tile.
  FOVEA_DEVICE_MEMBER std::int32_t look_up(const SequencePlace& place, std::int32_t batch,
                                           VisitedTile tile) const {
    if constexpr (!spec.is_paged) return 0;
    const ForwardParams& c = cta_.p.common;
    const std::int32_t key = tile.idx * spec.tile_kv + 32 * cta_.loader() + cta_.lane;
    if (key >= place.seqlen_kv) return 0;
    const std::int64_t at =
        batch * c.page_table_row_stride + entry_of_row(c, place.kv_row + key) * c.page_table.stride;
    // Of an i64 the low word: there are fewer than 2^31 pages.
    const auto* const words = static_cast<const std::int32_t*>(c.page_table.data);
    return static_cast<std::int32_t>(
        one_of(ptx::ld_global(words + (c.page_table.is_wide != 0 ? 2 * at : at)), c.num_slots));
  }

  FOVEA_DEVICE_MEMBER void queries(int stage, const RowTile& rows, const SequencePlace& place,
                                   int group) {
    copies_.queries(stage, rows, place, group);
  }

  FOVEA_DEVICE_MEMBER bool has_keys() const { return has_keys_; }
  /// Of the next kv tile whose keys are wanted.
  FOVEA_DEVICE_MEMBER void ask_for_keys(const KvRows& kv) {
    const ForwardParams& c = cta_.p.common;
    keys_.ask(cta_, c.k, cta_.p.k_scale, kv, c.head_dim_qk);
    ptx::cp_async_commit_group();
    has_keys_ = are_keys_newest_ = true;
  }
  FOVEA_DEVICE_MEMBER void ask_for_values(const KvRows& kv) {
    const ForwardParams& c = cta_.p.common;
    values_.ask(cta_, c.v, cta_.p.v_scale, kv, c.head_dim_v);
    ptx::cp_async_commit_group();
    are_keys_newest_ = false;
  }

  /// `posted`: words of this kv tile and the one after it.
  FOVEA_DEVICE_MEMBER void keys(int stage, const KvRows&, ptx::U32x2 posted) {
    if (cta_.loader() == 0 && cta_.lane == 0) ptx::st_shared(cta_.kv_tile_at(stage), posted);
    await_all_but_newest(are_keys_newest_);
    keys_.convert(typename T::KTile{cta_.k_at(stage)}, cta_.loader());
    has_keys_ = false;
    announce(cta_.barrier(T::kAt.k_full, stage));
  }

  FOVEA_DEVICE_MEMBER void values(int stage, const KvRows&, Pass pass) {
    await_all_but_newest(!are_keys_newest_);
    const typename T::VTile to{cta_.v_at(stage)};
    values_.convert(to, cta_.loader());
    if (pass != Pass::all) {
      ptx::sync_warp();
      copies_.rewrite(to, pass);
    }
    announce(cta_.barrier(T::kAt.v_full, stage));
  }

 private:
  using Keys = RowsOfCodes<spec, spec.k_codes, typename T::KTile>;
  using Values = RowsOfCodes<spec, spec.v_codes, typename T::VTile>;

  FOVEA_DEVICE_MEMBER static void await_all_but_newest(bool is_newest_wanted) {
    if (is_newest_wanted) {
      ptx::cp_async_wait_group<0>();
    } else {
      ptx::cp_async_wait_group<1>();
    }
  }

  /// wgmma reads by the async proxy what threads have written. Queries that were asked for before have come by now.
  FOVEA_DEVICE_MEMBER void announce(SharedAddress full) {
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
    copies_.finish();
  }

  const Cta<spec>& cta_;
  CpAsyncCopies<spec> copies_;  // of queries
  Keys keys_;
  Values values_;
  bool has_keys_ = false, are_keys_newest_ = false;
};

}  // namespace fovea::cuda::sm90
