// Keys and values of a cache of codes into shared memory, where they are numbers of the queries' 16 bits: by threads,
// for codes become numbers in registers. Queries are copied as copy_cp_async.cuh does it. Read load.cuh for the order.
//
//   k = scale_k code_k,  v = scale_v code_v       each product to f32, then to q's dtype, as sm80/attention_coded has it
//
// A warpgroup of its own has a lane for each of the 128 keys of a tile: it finds where the row begins, in a slot or a
// page, and its scale. Four lanes read 64 codes of a row, so eight rows are a step, and four steps are a warp's part.
//
// Memory is waited for beside conversions: as soon as a step of keys lies in shared memory its registers ask for that
// step of the values that come next, and the other way round. So one tile of codes is under way at any time, and there
// are registers for no more.
//
//   keys i      | write 0, ask values 0 | write 1, ask values 1 | ...
//   values i-1  | write 0, ask keys i+1, 0 | ...
//
// Bound: some seven instructions for two codes, 16,384 of them for a kv tile of head_dim 128, on the four schedulers
// that computing warps issue on, too.
#pragma once

#include "common/codes.cuh"
#include "common/element_pair.cuh"
#include "common/f16_codes.cuh"
#include "common/row_addresses.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/copy_cp_async.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// Four codes times a scale, each product rounded to f32.
template <Codes codes>
FOVEA_DEVICE FourNumbers scaled_codes(std::uint32_t word, float scale) {
  if constexpr (codes == Codes::e4m3) {
    const F16Pairs pairs = f16_pairs<codes>(word);
    return {{ptx::mul_rn(ptx::f32_of_f16_lo(pairs.first), scale),
             ptx::mul_rn(ptx::f32_of_f16_hi(pairs.first), scale),
             ptx::mul_rn(ptx::f32_of_f16_lo(pairs.second), scale),
             ptx::mul_rn(ptx::f32_of_f16_hi(pairs.second), scale)}};
  }
  return numbers_of<codes>(word, scale);
}

/// What one lane has of a warp's 32 rows of a tile.
template <auto spec, Codes codes, class Tile>
class RowsOfCodes {
  static constexpr int kLanesOfRow = 4, kRowsOfStep = 32 / kLanesOfRow;
  static constexpr int kSteps = 32 / kRowsOfStep;
  static constexpr int kCodes = 16;  // that a lane reads at once: two chunks of shared memory
  static constexpr int kPanelCodes = kLanesOfRow * kCodes;
  static_assert(Tile::kSpan == 2 * kPanelCodes, "panels are 64 numbers wide");

 public:
  FOVEA_DEVICE_MEMBER explicit RowsOfCodes(int lane) : lane_(lane), rows_(nullptr, false) {}

  /// Which rows ask() asks for. Those that do not exist become zeros, whatever lies there, and whatever their scale.
  FOVEA_DEVICE_MEMBER void find(const Cta<spec>& cta, const BshdParam& t, const ScaleParam& scale,
                                const KvRows& kv) {
    const std::int32_t row = 32 * cta.loader() + lane_;
    const bool exists = kv.idx >= 0 && row < kv.num_keys;
    const char* from = static_cast<const char*>(t.data);
    next_scale_ = 0;
    if (exists) {
      const KvPlace place = place_of(cta.p.common, kv, kv.first_row + kv.idx * spec.tile_kv + row);
      from += place.in(t, kv.kv_head);
      next_scale_ =
          ptx::ld_global(scale_at(scale, kv.sequence, place.batch, place.row, kv.kv_head));
    }
    rows_ = RowAddresses(from, exists);
    finds_ = kv.idx >= 0;
  }

  /// Of rows that were found.
  FOVEA_DEVICE_MEMBER void ask(int step, std::int32_t head_dim) {
    const int row = kRowsOfStep * step + lane_ / kLanesOfRow;
    const char* const from = rows_.at(row) + kCodes * (lane_ % kLanesOfRow);
    const bool exists = rows_.exists(row);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      const int first = kPanelCodes * panel;
      codes_[panel][step] = {};
      if (exists && first + kCodes * (lane_ % kLanesOfRow) < head_dim)
        codes_[panel][step] = ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(from + first));
    }
  }
  FOVEA_DEVICE_MEMBER void asked() {
    scale_ = next_scale_;
    has_codes_ = finds_;
    rows_ = RowAddresses(nullptr, false);
    finds_ = false;
  }

  FOVEA_DEVICE_MEMBER bool has_codes() const { return has_codes_; }
  FOVEA_DEVICE_MEMBER void ask_all(std::int32_t head_dim) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ask(step, head_dim);
    asked();
  }

  /// Writes what was asked for, and asks for what `beside` has found.
  template <class Beside>
  FOVEA_DEVICE_MEMBER void write(const Tile& to, int loader, Beside& beside,
                                 std::int32_t head_dim_beside) {
    const SharedAddress first =
        to.chunk(32 * loader + lane_ / kLanesOfRow, 2 * (lane_ % kLanesOfRow));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float scale = ptx::shfl_idx(scale_, kRowsOfStep * step + lane_ / kLanesOfRow);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        const ptx::U32x4& four = codes_[panel][step];
        // Eight rows on the swizzle is the same.
        const SharedAddress at =
            first + panel * Tile::kPanelBytes + step * kRowsOfStep * Tile::kSpan;
        ptx::st_shared(at, eight(four.x, four.y, scale));
        ptx::st_shared(at ^ 16U, eight(four.z, four.w, scale));
      }
      beside.ask(step, head_dim_beside);
    }
    has_codes_ = false;
    beside.asked();
  }

 private:
  /// Paged: kv.batch is the page of this lane's row.
  FOVEA_DEVICE_MEMBER static KvPlace place_of(const ForwardParams& c, const KvRows& kv,
                                              std::int32_t row) {
    if constexpr (!spec.is_paged) return {kv.batch, row};
    return {kv.batch, row - entry_of_row(c, row) * c.page_size};
  }

  FOVEA_DEVICE_MEMBER static ptx::U32x4 eight(std::uint32_t low, std::uint32_t high, float scale) {
    const FourNumbers a = scaled_codes<codes>(low, scale);
    const FourNumbers b = scaled_codes<codes>(high, scale);
    return {pair_of<spec.element>(a.x[0], a.x[1]), pair_of<spec.element>(a.x[2], a.x[3]),
            pair_of<spec.element>(b.x[0], b.x[1]), pair_of<spec.element>(b.x[2], b.x[3])};
  }

  const int lane_;
  RowAddresses rows_;
  float next_scale_ = 0, scale_ = 0;  // of this lane's row: found, and asked for
  bool finds_ = false, has_codes_ = false;
  ptx::U32x4 codes_[Tile::kPanels][kSteps];
};

template <auto spec>
class CodeCopies {
 public:
  using T = Traits<spec>;

  FOVEA_DEVICE_MEMBER explicit CodeCopies(const Cta<spec>& of_cta)
      : cta_(of_cta), copies_(of_cta), keys_(of_cta.lane), values_(of_cta.lane) {}

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

  /// Of the first kv tile of a row tile: nobody has asked for its keys yet.
  FOVEA_DEVICE_MEMBER void ask_for_keys(const KvRows& kv) {
    if (keys_.has_codes()) return;
    find_keys(kv);
    keys_.ask_all(cta_.p.common.head_dim_qk);
  }
  /// What is asked for while the next values, or keys, are written; none: nothing.
  FOVEA_DEVICE_MEMBER void find_keys(const KvRows& kv) {
    keys_.find(cta_, cta_.p.common.k, cta_.p.k_scale, kv);
  }
  FOVEA_DEVICE_MEMBER void find_values(const KvRows& kv) {
    values_.find(cta_, cta_.p.common.v, cta_.p.v_scale, kv);
  }

  /// `posted`: words of this kv tile and the one after it.
  FOVEA_DEVICE_MEMBER void keys(int stage, const KvRows&, ptx::U32x2 posted) {
    if (cta_.loader() == 0 && cta_.lane == 0) ptx::st_shared(cta_.kv_tile_at(stage), posted);
    keys_.write(typename T::KTile{cta_.k_at(stage)}, cta_.loader(), values_,
                cta_.p.common.head_dim_v);
    announce(cta_.barrier(T::kAt.k_full, stage));
  }

  /// Of the kv tile that was found last but one, or if no keys came after it last.
  FOVEA_DEVICE_MEMBER void values(int stage, const KvRows&, Pass pass) {
    const ForwardParams& c = cta_.p.common;
    if (!values_.has_codes()) values_.ask_all(c.head_dim_v);
    const typename T::VTile to{cta_.v_at(stage)};
    values_.write(to, cta_.loader(), keys_, c.head_dim_qk);
    if (pass != Pass::all) {
      ptx::sync_warp();
      copies_.rewrite(to, pass);
    }
    announce(cta_.barrier(T::kAt.v_full, stage));
  }

 private:
  /// wgmma reads by the async proxy what threads have written. Queries that were asked for before have come by now.
  FOVEA_DEVICE_MEMBER void announce(SharedAddress full) {
    ptx::fence_proxy_async_shared_cta();
    cta_.release(full);
    copies_.finish();
  }

  const Cta<spec>& cta_;
  CpAsyncCopies<spec> copies_;  // of queries
  RowsOfCodes<spec, spec.k_codes, typename T::KTile> keys_;
  RowsOfCodes<spec, spec.v_codes, typename T::VTile> values_;
};

}  // namespace fovea::cuda::sm90
