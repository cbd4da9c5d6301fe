// Rows of a warpgroup at the end of a split. The first group leaves its sums in shared memory and goes on with the next
// split; the second adds its own where they lie, and folds them as rows of other tiles are (unit.cuh), but those of a
// warp side by side: one after the other, those of 64 rows took as long as the keys of their split.
//
//   parts    [row] sums, then origin, sum, maximum, and 0 times each of the sums added: NaN where one is not finite
//   states   [level][row] sums, then top, sum and maximum (fold_splits.cuh)
#pragma once

#include "common/bits.cuh"
#include "common/fold_splits.cuh"
#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "sm90/decode/fold.cuh"
#include "team/compute.cuh"
#include "team/join.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

/// What this thread has of its warp's rows in the products' fragments, added to what lies in `parts`. Of two summands
/// the order is the same either way.
template <Sm90DecodeSpec spec, class Mods>
FOVEA_DEVICE void add_group(const Cta<spec>& cta, const team::Team<Layout<spec>::kWarpSpec>& team,
                            const team::Sums<Layout<spec>::kWarpSpec, Mods>& sums) {
  using T = typename Layout<spec>::T;
  const float c = spec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = team.my_row(0, half);
    const RowState whole = sums.whole_row(0, half);
    const team::PartState own{whole.origin, whole.sum, sums.row_max[0][half]};
    const team::PartState other = cta.parts().state(0, row);
    const float origin = ptx::max_ftz(own.origin, other.origin);
    const float own_weight = weight_of(own, origin, c), other_weight = weight_of(other, origin, c);
    const auto add = [&](float x, float y) {
      return ptx::mul_rn(own_weight, x) + ptx::mul_rn(other_weight, y);
    };
    float zero = 0;
#pragma unroll
    for (int j = 0; j < T::kColBlocks; ++j) {
      const SharedAddress at = cta.parts().at(0, row) + (j * 8 + team.lane % 4 * 2) * 4;
      const auto pair = ptx::ld_shared<ptx::F32x2>(at);
      const float(&block)[4] = sums.out[0][j];
      const ptx::F32x2 both{add(block[half * 2], pair.x), add(block[half * 2 + 1], pair.y)};
      zero = ptx::fma_rn(both.x, 0.0F, ptx::fma_rn(both.y, 0.0F, zero));
      ptx::st_shared(at, both);
    }
    zero += ptx::shfl_bfly(zero, 1);
    zero += ptx::shfl_bfly(zero, 2);
    ptx::sync_warp();  // all lanes have read the other's state
    if (team.lane % 4 == 0)
      cta.parts().put_state(0, row, {origin, add(own.sum, other.sum)},
                            ptx::max_ftz(own.row_max, other.row_max), zero);
  }
}

/// Those of a warp: two lanes have one, every other four of its columns each. Its sums lie in `parts`, times `factor`.
template <Sm90DecodeSpec spec, class Mods>
class RowsOfGroup {
  using L = Layout<spec>;
  using Team = team::Team<L::kWarpSpec>;
  using Fold = RowFold<spec, Mods>;
  using Row = typename Fold::Row;

 public:
  FOVEA_DEVICE_MEMBER RowsOfGroup(const Cta<spec>& cta, const Team& team)
      : cta_(cta),
        row_(team.warp * kDecodeRows + team.lane / 2),
        half_(team.lane % 2),
        r_(team.row_at(row_)),
        part_(cta.parts().at(0, row_) + kColumnBytes * half_) {}

  FOVEA_DEVICE_MEMBER void finish(const Team& team, Unit unit) const {
    ptx::sync_warp();  // other lanes have put what this one reads
    Ended part = end_of_split(team);
    if (unit == Unit::split) {
      if (r_.exists && !part.is_careful) store_part(part);
      return;
    }
    if constexpr (spec.takes_groups) {
      if (!fold_in(part, 0, ends_group(r_.work))) return;
      if (unit == Unit::group) {
        if (r_.exists) store_part(part);
        return;
      }
      if (fold_in(part, 1, ends_sequence(r_.work)) && r_.exists) store_row(part);
    }
  }

 private:
  static constexpr int kQuads = spec.head_dim_v / 8;  // of a row's columns, in a lane
  static constexpr int kColumnBytes = 16;
  static constexpr int kBesideAt = 4 * spec.head_dim_v;

  /// A row of a split, or of several.
  struct Ended {
    FoldedSplits parts;  // of several
    float lse, beside, sum, row_max, factor;
    bool is_careful;  // computed key by key: it lies in memory, too
  };

  FOVEA_DEVICE_MEMBER static int offset(int quad) { return 2 * kColumnBytes * quad; }
  FOVEA_DEVICE_MEMBER int column(int quad) const { return 8 * quad + 4 * half_; }
  FOVEA_DEVICE_MEMBER bool is_first_of_row() const { return half_ == 0; }

  // ---- the split ---------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER Ended end_of_split(const Team& team) const {
    const float unit = spec.is_prescaled ? 1.0F : team.p.softmax_scale;
    const auto state = ptx::ld_shared<ptx::F32x4>(cta_.parts().at(0, row_) + L::Parts::kStateAt);
    RowResult result = finish_row({state.x, state.y}, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= team.p.dropout_keep_scale;
    const float row_max = finish_row_max(state.z, state.y, unit);
    Ended ended{{},      result.lse, beside_lse(result.lse, state.y, row_max),
                state.y, row_max,    result.factor,
                false};
    const std::uint32_t careful = ptx::ballot(r_.exists && is_nan(state.w));
    if (careful != 0) go_key_by_key(team, careful, ended);
    return ended;
  }

  /// Rows of these lanes. They come back from memory, where that leaves them.
  FOVEA_DEVICE_MEMBER void go_key_by_key(const Team& team, std::uint32_t lanes,
                                         Ended& ended) const {
#pragma unroll 1
    for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const int lane = lowest_bit(rest);
      if (lane % 2 == 0)
        compute_carefully<spec, Mods>(cta_, team.row_at(team.warp * kDecodeRows + lane / 2));
    }
    ptx::sync_warp();
    ended.is_careful = (lanes >> ptx::lane_idx() & 1U) != 0;
    if (ended.is_careful) {
      ended.lse = ptx::ld_global(r_.p.partial_lse + r_.partial_at());
      ended.beside = -infinity();
      if (spec.wants_row_max || is_huge(ended.lse))
        ended.beside = ptx::ld_global(r_.p.partial_max + r_.partial_at());
      ended.factor = 1.0F;
#pragma unroll 1
      for (int i = 0; i < kQuads; ++i)
        ptx::st_shared(part_ + offset(i), ptx::ld_global(columns_of(i)));
    }
    ptx::sync_warp();  // before a group's state goes there
  }

  // ---- splits of a unit --------------------------------------------------------------------------

  /// The row so far, from its state. At the end of a level it is where the split was, and true.
  FOVEA_DEVICE_MEMBER bool fold_in(Ended& part, int level, bool is_end) const {
    const bool is_first =
        level == 0 ? r_.work.split % kSplitsOfGroup == 0 : r_.work.split < kSplitsOfGroup;
    const SharedAddress row_state =
        cta_.smem + L::kAt.states + (level * spec.tile_q + row_) * L::kAt.state_bytes;
    const SharedAddress state = row_state + kColumnBytes * half_;
    part.parts = {};
    if (!is_first) {
      const auto beside = ptx::ld_shared<ptx::F32x4>(row_state + kBesideAt);
      part.parts = {beside.x, beside.y, beside.z};
    }
    const FoldStep step = part.parts.add(part.lse, part.beside);
    const SharedAddress to = is_end ? part_ : state;
    const auto add_columns = [&](const auto& folded) {
#pragma unroll 4
      for (int i = 0; i < kQuads; ++i) {
        const ptx::F32x4 so_far =
            is_first ? ptx::F32x4{0, 0, 0, 0} : ptx::ld_shared<ptx::F32x4>(state + offset(i));
        const auto columns = ptx::ld_shared<ptx::F32x4>(part_ + offset(i));
        ptx::st_shared(to + offset(i), folded(so_far, step, times(columns, part.factor)));
      }
    };
    // Where all have weights, fold() has the same bits.
    const bool has_weights = (is_first || step.kept != 0) && step.added != 0;
    if (ptx::vote_all(has_weights)) {
      add_columns([](const auto&... x) { return fold_finite(x...); });
    } else {
      add_columns([](const auto&... x) { return fold(x...); });
    }
    if (!is_end) {
      ptx::sync_warp();  // both lanes have read what is beside
      if (is_first_of_row()) {
        ptx::st_shared(row_state + kBesideAt,
                       ptx::F32x4{part.parts.top, part.parts.sum, part.parts.row_max, 0.0F});
      }
      return false;
    }
    const RowResult result = part.parts.result();
    part.lse = result.lse;
    part.beside = beside_lse(result.lse, part.parts.sum, part.parts.row_max);
    part.sum = part.parts.sum;
    part.row_max = part.parts.row_max;
    part.factor = result.factor;
    return true;
  }

  // ---- memory ------------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER ptx::F32x4* columns_of(int quad) const {
    return reinterpret_cast<ptx::F32x4*>(r_.out_f32() + column(quad));
  }

  /// Of a split or a group.
  FOVEA_DEVICE_MEMBER void store_part(const Ended& part) const {
    if (is_first_of_row()) r_.store_values(part.lse, part.sum, part.row_max);
#pragma unroll 4
    for (int i = 0; i < kQuads; ++i) {
      const auto columns = ptx::ld_shared<ptx::F32x4>(part_ + offset(i));
      ptx::st_global_cache_hint(columns_of(i), times(columns, part.factor), cta_.policy_of_sums());
    }
  }

  FOVEA_DEVICE_MEMBER void store_row(const Ended& all) const {
    const auto r = r_.template as<Fold::kFinalSpec>();
    const float factor = Fold::store_values(r, all.parts, is_first_of_row());
#pragma unroll 4
    for (int i = 0; i < kQuads; ++i)
      Fold::store_sums(r, column(i), ptx::ld_shared<ptx::F32x4>(part_ + offset(i)), factor);
  }

  const Cta<spec>& cta_;
  const int row_, half_;
  const Row r_;
  const SharedAddress part_;
};

}  // namespace fovea::cuda::sm90::decoding
