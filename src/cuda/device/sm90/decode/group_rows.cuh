// Rows of two warpgroups at the end of a split. A row is two warps', one of each group, which have its sums over every
// other box. They exchange halves of the columns through shared memory: from there on each has all of the keys, and in
// registers half of the columns, for which it stores the row, or folds it as rows of other tiles are (unit.cuh).
//
//   parts    [row] the sums of the group that does not keep the column; then of either group origin, sum, maximum
//   states   [quad][thread] columns of a sequence so far
#pragma once

#include "common/bits.cuh"
#include "common/fold_splits.cuh"
#include "common/online_softmax.cuh"
#include "common/store_columns.cuh"
#include "ptx/barrier.cuh"
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

template <Sm90DecodeSpec spec, class Mods>
class RowsOfGroup {
  using L = Layout<spec>;
  using Team = team::Team<L::kWarpSpec>;
  using Sums = team::Sums<L::kWarpSpec, Mods>;
  using Fold = RowFold<spec, Mods>;
  using Row = typename Fold::Row;

 public:
  FOVEA_DEVICE_MEMBER RowsOfGroup(const Cta<spec>& cta, int group) : cta_(cta), group_(group) {}

  /// The CTA's next split; of a sequence without queries, a rehearsal, all that is done of one but for stores.
  FOVEA_DEVICE_MEMBER void add(const Team& team, const Sums& sums, Unit unit) {
    if (!team.warp_has_rows() && !is_rehearsal(team)) return;
    Columns columns;
    team::PartState rows[2];
    exchange(team, sums, columns, rows);
    Ended part[2] = {end_of_split(team, rows[0]), end_of_split(team, rows[1])};
    if (is_rehearsal(team))
      part[0].lse = part[1].lse = 0;  // by the steps that splits with keys take
    RowBits careful{not_finite(team, columns, 0), not_finite(team, columns, 1)};
    tell_other_group(careful);
    if (__builtin_expect((careful.x | careful.y) != 0, 0))
      go_key_by_key(team, columns, careful, part);
    const Work& work [[maybe_unused]] = team.work;
    if (spec.takes_groups && unit != Unit::split) {
      fold_in(InRegisters{group_columns_}, of_group_, work.split % kSplitsOfGroup == 0, columns,
              part);
      if (!ends_group(work)) return;
      finish(of_group_, part);
      careful = {0, 0};  // what a row's last split left there goes
      if (unit == Unit::sequence) {
        fold_in(in_shared(), of_sequence_, work.split < kSplitsOfGroup, columns, part);
        if (!ends_sequence(work)) return;
        finish(of_sequence_, part);
        store_rows(team, columns, part);
        return;
      }
    }
    store_part(team, columns, part, careful);
  }

  /// Of a cluster's CTA: all columns go where the other warps look for them (team/join.cuh).
  FOVEA_DEVICE_MEMBER void put(const Team& team, const Sums& sums) const {
    if (!team.warp_has_rows()) return;
    Columns columns;
    team::PartState rows[2];
    exchange(team, sums, columns, rows);
    wait_for_other_group();  // both have read what lies there
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_first_of_row()) {
        cta_.parts().put_state(0, team.my_row(0, half), {rows[half].origin, rows[half].sum},
                               rows[half].row_max);
      }
      const SharedAddress to = pair_at(team, half, group_);
#pragma unroll
      for (int j = 0; j < kColBlocks; ++j) ptx::st_shared(to + 32 * j, pair_of(columns[j], half));
    }
  }

 private:
  static constexpr int kColBlocks = spec.head_dim_v / 2 / 8;
  static constexpr int kStateBytes = 16;
  using Columns = float[kColBlocks][4];
  using Quad = ptx::F32x4;
  /// Lanes of the warp whose rows these are: of the first half of its fragments, of the second.
  using RowBits = ptx::U32x2;

  /// A row of a split, or of several; its columns, times `factor`, are beside it.
  struct Ended {
    FoldedSplits parts;  // of several
    float lse, beside, sum, row_max, factor;
  };

  FOVEA_DEVICE_MEMBER int lane() const { return cta_.lane; }
  FOVEA_DEVICE_MEMBER static bool is_rehearsal(const Team& team) {
    return spec.takes_groups && team.work.sequence.seqlen_q == 0;
  }
  FOVEA_DEVICE_MEMBER static Row row_of(const Team& team, int half) {
    return team.row_at(team.my_row(0, half));
  }
  FOVEA_DEVICE_MEMBER bool is_first_of_row() const { return group_ == 0 && lane() % 4 == 0; }

  /// The two warps of the same rows.
  FOVEA_DEVICE_MEMBER void wait_for_other_group() const {
    ptx::bar_sync(kFirstOfPairs + cta_.warp % L::kBlocks, 2 * 32);
  }

  // ---- both groups' sums -------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER static ptx::F32x2 pair_of(const float (&block)[4], int half) {
    return {block[half * 2], block[half * 2 + 1]};
  }

  /// Of this thread's row, its first pair of those columns that `group` keeps.
  FOVEA_DEVICE_MEMBER SharedAddress pair_at(const Team& team, int half, int group) const {
    return cta_.parts().at(0, team.my_row(0, half)) +
           4 * (group * spec.head_dim_v / 2 + lane() % 4 * 2);
  }
  FOVEA_DEVICE_MEMBER SharedAddress state_at(const Team& team, int half, int group) const {
    return cta_.parts().at(0, team.my_row(0, half)) + L::Parts::kStateAt + kStateBytes * group;
  }

  /// Of its columns the other group's half goes there. What both have is the same either way: of two summands.
  FOVEA_DEVICE_MEMBER void exchange(const Team& team, const Sums& sums, Columns& columns,
                                    team::PartState (&rows)[2]) const {
    const int other = 1 - group_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState whole = sums.whole_row(0, half);
      rows[half] = {whole.origin, whole.sum, sums.greatest(0, half)};
      if (lane() % 4 == 0) {
        ptx::st_shared(state_at(team, half, group_),
                       Quad{whole.origin, whole.sum, rows[half].row_max, 0.0F});
      }
      const SharedAddress to = pair_at(team, half, other);
#pragma unroll
      for (int j = 0; j < kColBlocks; ++j) {
        const auto low = pair_of(sums.out[0][j], half);
        const auto high = pair_of(sums.out[0][kColBlocks + j], half);
        ptx::st_shared(to + 32 * j, group_ == 0 ? high : low);
        const auto own = group_ == 0 ? low : high;
        columns[j][half * 2] = own.x, columns[j][half * 2 + 1] = own.y;
      }
    }
    wait_for_other_group();
    const float c = spec.is_prescaled ? kLog2E : team.p.softmax_scale_log2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      team::PartState& own = rows[half];
      const auto state = ptx::ld_shared<Quad>(state_at(team, half, other));
      const team::PartState theirs{state.x, state.y, state.z};
      const float origin = ptx::max_ftz(own.origin, theirs.origin);
      const float weight = weight_of(own, origin, c), other_weight = weight_of(theirs, origin, c);
      const auto add = [&](float x, float y) {
        return ptx::mul_rn(weight, x) + ptx::mul_rn(other_weight, y);
      };
      const SharedAddress from = pair_at(team, half, group_);
#pragma unroll
      for (int j = 0; j < kColBlocks; ++j) {
        const auto pair = ptx::ld_shared<ptx::F32x2>(from + 32 * j);
        float(&block)[4] = columns[j];
        block[half * 2] = add(block[half * 2], pair.x);
        block[half * 2 + 1] = add(block[half * 2 + 1], pair.y);
      }
      own = {origin, add(own.sum, theirs.sum), ptx::max_ftz(own.row_max, theirs.row_max)};
    }
  }

  // ---- the split ---------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER static Ended end_of_split(const Team& team, const team::PartState& row) {
    const float unit = spec.is_prescaled ? 1.0F : team.p.softmax_scale;
    RowResult result = finish_row({row.origin, row.sum}, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= team.p.dropout_keep_scale;
    const float row_max = finish_row_max(row.row_max, row.sum, unit);
    const float beside = beside_lse(result.lse, row.sum, row_max);
    return {{}, result.lse, beside, row.sum, row_max, result.factor};
  }

  /// Rows with a column of this group's that is not finite.
  FOVEA_DEVICE_MEMBER static std::uint32_t not_finite(const Team& team, const Columns& columns,
                                                      int half) {
    float zero = 0;
#pragma unroll
    for (int j = 0; j < kColBlocks; ++j) {
      const float(&block)[4] = columns[j];
      zero = ptx::fma_rn(block[half * 2], 0.0F, ptx::fma_rn(block[half * 2 + 1], 0.0F, zero));
    }
    zero += ptx::shfl_bfly(zero, 1);
    zero += ptx::shfl_bfly(zero, 2);
    return ptx::ballot(row_of(team, half).exists && is_nan(zero));
  }

  /// Rows of either group: all columns of a row are computed the same way.
  FOVEA_DEVICE_MEMBER void tell_other_group(RowBits& rows) const {
    constexpr int kBytes = sizeof(RowBits);
    const SharedAddress words = cta_.smem + L::kAt.rows_beside;
    if (lane() == 0) ptx::st_shared(words + kBytes * cta_.warp, rows);
    wait_for_other_group();
    const auto others = ptx::ld_shared<RowBits>(words + kBytes * (cta_.warp ^ L::kBlocks));
    rows = {rows.x | others.x, rows.y | others.y};
  }

  /// Rows of these lanes, by the first group. They come back from memory, where that leaves them.
  FOVEA_DEVICE_MEMBER void go_key_by_key(const Team& team, Columns& columns, const RowBits& careful,
                                         Ended (&part)[2]) const {
    if (group_ == 0) compute_rows(team, careful);
    wait_for_other_group();
    load_rows(team, columns, careful.x, 0, part[0]);
    load_rows(team, columns, careful.y, 1, part[1]);
    wait_for_other_group();  // before a group's state goes there
  }

  FOVEA_DEVICE_MEMBER void compute_rows(const Team& team, const RowBits& rows) const {
#pragma unroll 1
    for (int row = 0; row < kDecodeRows; ++row) {
      const std::uint32_t lanes = row < 8 ? rows.x : rows.y;
      if ((lanes >> row % 8 * 4 & 1U) != 0)
        compute_carefully<spec, Mods>(cta_, team.row_at(team.warp * kDecodeRows + row));
    }
  }

  FOVEA_DEVICE_MEMBER void load_rows(const Team& team, Columns& columns, std::uint32_t lanes,
                                     int half, Ended& part) const {
    if ((lanes >> lane() & 1U) == 0) return;
    const Row r = row_of(team, half);
    part.lse = ptx::ld_global(r.p.partial_lse + r.partial_at());
    part.beside = -infinity();
    if (spec.wants_row_max || is_huge(part.lse))
      part.beside = ptx::ld_global(r.p.partial_max + r.partial_at());
    part.factor = 1.0F;
    const float* const from = r.out_f32() + group_ * spec.head_dim_v / 2 + lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColBlocks; ++j) {
      const auto pair = ptx::ld_global(reinterpret_cast<const ptx::F32x2*>(from + 8 * j));
      columns[j][half * 2] = pair.x, columns[j][half * 2 + 1] = pair.y;
    }
  }

  // ---- splits of a unit --------------------------------------------------------------------------

  /// Where columns so far lie: of two neighbouring blocks.
  struct InRegisters {
    Columns& columns;
    FOVEA_DEVICE_MEMBER Quad load(int j, int half) const { return quad_of(columns, j, half); }
    FOVEA_DEVICE_MEMBER void store(int j, int half, const Quad& x) const {
      put_quad(columns, j, half, x);
    }
  };
  struct InShared {
    SharedAddress first;
    FOVEA_DEVICE_MEMBER SharedAddress at(int j, int half) const {
      return first + (j + half) * L::kReaders * 32 * static_cast<int>(sizeof(Quad));
    }
    FOVEA_DEVICE_MEMBER Quad load(int j, int half) const {
      return ptx::ld_shared<Quad>(at(j, half));
    }
    FOVEA_DEVICE_MEMBER void store(int j, int half, const Quad& x) const {
      ptx::st_shared(at(j, half), x);
    }
  };

  FOVEA_DEVICE_MEMBER InShared in_shared() const {
    constexpr int kBytes = sizeof(Quad);
    return {cta_.smem + L::kAt.states + (cta_.warp * 32 + lane()) * kBytes};
  }

  /// The rows so far: `so_far` and where `state` says, and columns in `columns` too.
  template <class State>
  FOVEA_DEVICE_MEMBER static void fold_in(const State& state, FoldedSplits (&so_far)[2],
                                          bool is_first, Columns& columns, const Ended (&part)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_first) so_far[half] = {};
      FoldStep step = so_far[half].add(part[half].lse, part[half].beside);
      float factor = part[half].factor;
      const bool has_weights = (is_first || step.kept != 0) && step.added != 0;
      if (__builtin_expect(!ptx::vote_all(has_weights), 0))
        weigh(state, half, is_first, columns, step, factor);
#pragma unroll
      for (int j = 0; j < kColBlocks; j += 2) {
        const Quad before = is_first ? Quad{0, 0, 0, 0} : state.load(j, half);
        const Quad now = fold_finite(before, step, times(quad_of(columns, j, half), factor));
        state.store(j, half, now);
        put_quad(columns, j, half, now);
      }
    }
  }

  /// What has no weight gets its product with it, and a weight of 1: then fold_finite() has the bits of fold().
  template <class State>
  FOVEA_DEVICE_MEMBER static void weigh(const State& state, int half, bool is_first,
                                        Columns& columns, FoldStep& step, float& factor) {
    const bool keeps = is_first || step.kept != 0, adds = step.added != 0;
#pragma unroll
    for (int j = 0; j < kColBlocks; j += 2) {
      if (!keeps) state.store(j, half, without_weight(state.load(j, half), true));
      const Quad part = times(quad_of(columns, j, half), factor);
      if (!adds) put_quad(columns, j, half, without_weight(part, step.is_seen));
    }
    if (!keeps) step.kept = 1.0F;
    if (!adds) step.added = factor = 1.0F;
  }

  FOVEA_DEVICE_MEMBER static Quad without_weight(const Quad& x, bool is_seen) {
    const auto product = [is_seen](float each) {
      if (is_finite(each)) return 0.0F * each;
      return is_seen ? each : 0.0F;
    };
    return {product(x.x), product(x.y), product(x.z), product(x.w)};
  }

  /// All splits of a level have been folded.
  FOVEA_DEVICE_MEMBER static void finish(const FoldedSplits (&folded)[2], Ended (&part)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const FoldedSplits& parts = folded[half];
      const RowResult result = parts.result();
      part[half] = {parts,     result.lse,    beside_lse(result.lse, parts.sum, parts.row_max),
                    parts.sum, parts.row_max, result.factor};
    }
  }

  FOVEA_DEVICE_MEMBER static Quad quad_of(const Columns& columns, int j, int half) {
    return {columns[j][half * 2], columns[j][half * 2 + 1], columns[j + 1][half * 2],
            columns[j + 1][half * 2 + 1]};
  }
  FOVEA_DEVICE_MEMBER static void put_quad(Columns& columns, int j, int half, const Quad& x) {
    columns[j][half * 2] = x.x, columns[j][half * 2 + 1] = x.y;
    columns[j + 1][half * 2] = x.z, columns[j + 1][half * 2 + 1] = x.w;
  }

  // ---- memory ------------------------------------------------------------------------------------

  /// visit(column, it and the three behind it), for all that this lane has once neighbours have exchanged pairs.
  template <class Visit>
  FOVEA_DEVICE_MEMBER void for_each_quad(const Columns& columns, int half, Visit&& visit) const {
    const bool is_odd = lane() % 2 != 0;
    const int first = group_ * spec.head_dim_v / 2 + (is_odd ? 8 : 0) + lane() % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < kColBlocks; j += 2) {
      const Quad own = quad_of(columns, j, half);
      const float x = ptx::shfl_bfly(is_odd ? own.x : own.z, 1);
      const float y = ptx::shfl_bfly(is_odd ? own.y : own.w, 1);
      visit(first + 8 * j, is_odd ? Quad{x, y, own.z, own.w} : Quad{own.x, own.y, x, y});
    }
  }

  /// Of a split or a group; those that are in memory already stay.
  FOVEA_DEVICE_MEMBER void store_part(const Team& team, const Columns& columns,
                                      const Ended (&part)[2], const RowBits& stored) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row r = row_of(team, half);
      const std::uint32_t lanes = half == 0 ? stored.x : stored.y;
      const bool is_mine = r.exists && (lanes >> lane() & 1U) == 0;
      if (is_mine && is_first_of_row())
        r.store_values(part[half].lse, part[half].sum, part[half].row_max);
      for_each_quad(columns, half, [&](int column, const Quad& quad) {
        if (!is_mine) return;
        ptx::st_global_cache_hint(reinterpret_cast<Quad*>(r.out_f32() + column),
                                  times(quad, part[half].factor), cta_.policy_of_sums());
      });
    }
  }

  /// Stored with no question of its columns, which takes an eighth of the instructions.
  template <class OutRow>
  FOVEA_DEVICE_MEMBER static bool is_plain(const Team& team, const OutRow& r) {
    return spec.out_element != Element::f32 && team.p.head_dim_v == spec.head_dim_v &&
           has_plain_columns(team.p.out, r.out_at());
  }

  FOVEA_DEVICE_MEMBER void store_rows(const Team& team, const Columns& columns,
                                      const Ended (&all)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Row of_split = row_of(team, half);
      const auto r = of_split.template as<Fold::kFinalSpec>();
      const float factor = Fold::store_values(r, all[half].parts, r.exists && is_first_of_row());
      if (__builtin_expect(ptx::vote_all(!r.exists || (factor != 0 && is_plain(team, r))), 1)) {
        auto* const to =
            static_cast<std::uint16_t*>(const_cast<void*>(team.p.out.data)) + r.out_at();
        for_each_quad(columns, half, [&](int column, const Quad& quad) {
          if (r.exists) store_plain_columns<spec.out_element>(to + column, times(quad, factor));
        });
        continue;
      }
      for_each_quad(columns, half, [&](int column, const Quad& quad) {
        if (r.exists) Fold::store_sums(r, column, quad, factor);
      });
    }
  }

  const Cta<spec>& cta_;
  const int group_;
  FoldedSplits of_group_[2], of_sequence_[2];
  Columns group_columns_;
};

}  // namespace fovea::cuda::sm90::decoding
