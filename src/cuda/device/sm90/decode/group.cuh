// Splits of a group (shared/split.h) made one state by the CTA that takes them one after the other: each warp has its
// rows' in registers from the first split to the last.
#pragma once

#include "common/fold_splits.cuh"
#include "common/sequence.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/split.h"
#include "sm90/decode/cta.cuh"
#include "team/join.cuh"
#include "team/team.cuh"

namespace fovea::cuda::sm90::decoding {

template <Sm90DecodeSpec spec, class Mods>
class Group {
  using L = Layout<spec>;
  using Join = team::Join<L::kWarpSpec, Mods, typename L::Parts>;
  using Row = RowView<L::kWarpSpec>;

 public:
  /// Of the CTA's next split rows warp, warp + kReaders, ...; behind the last split of a group their states go out.
  /// careful(row) computes one again whose sums are not finite.
  template <class Careful>
  FOVEA_DEVICE_MEMBER void add(int warp, const Join& join, ptx::CachePolicy policy,
                               const Careful& careful) {
    const Work& split = join.team.work;
    Work of_group = split;
    of_group.split /= splits_of_group(split.sequence.seqlen_kv, spec.most_splits);
    const bool is_last = ends_group<spec>(split);
    const team::Team<L::kWarpSpec> team{join.team.p, of_group, join.team.smem, 0, join.team.lane};
#pragma unroll 1
    for (int row = warp; row < spec.tile_q; row += L::kReaders) {
      const Row r = team.row_at(row);
      if (r.exists) add_row(join, row, r, careful);
      if (r.exists && is_last) store(r, policy);
      turn(is_last);
    }
  }

 private:
  struct State {
    FoldedSplits splits;
    ptx::F32x4 sums{0, 0, 0, 0};
  };
  static constexpr int kRowsOfWarp = spec.tile_q / L::kReaders;

  template <class Careful>
  FOVEA_DEVICE_MEMBER void add_row(const Join& join, int row, const Row& r,
                                   const Careful& careful) {
    const team::JoinedRow joined = join.join(row);
    float lse = joined.result.lse;
    float beside = beside_lse(lse, joined.sum, joined.row_max);
    ptx::F32x4 columns = joined.columns;
    if (!joined.is_finite) {
      careful(r);
      ptx::sync_warp();  // its lanes have other columns
      lse = ptx::ld_global(r.p.partial_lse + r.partial_at());
      if (spec.wants_row_max || is_huge(lse))
        beside = ptx::ld_global(r.p.partial_max + r.partial_at());
      if (has_columns()) columns = ptx::ld_global(columns_of(r));
      ptx::sync_warp();  // before the next split's, or the group's, go there
    }
    const FoldStep step = states_[0].splits.add(lse, beside);
    states_[0].sums = fold(states_[0].sums, step, columns);
  }

  FOVEA_DEVICE_MEMBER void store(const Row& r, ptx::CachePolicy policy) const {
    const FoldedSplits& all = states_[0].splits;
    const RowResult result = all.result();
    const ptx::F32x4& sums = states_[0].sums;
    if (ptx::lane_idx() == 0) r.store_values(result.lse, all.sum, all.row_max);
    if (has_columns())
      ptx::st_global_cache_hint(columns_of(r),
                                {sums.x * result.factor, sums.y * result.factor,
                                 sums.z * result.factor, sums.w * result.factor},
                                policy);
  }

  /// The next row's state comes to the front, so that code for a row is there once and all states are in registers.
  FOVEA_DEVICE_MEMBER void turn(bool is_last) {
    const State first = is_last ? State{} : states_[0];
#pragma unroll
    for (int i = 0; i + 1 < kRowsOfWarp; ++i) states_[i] = states_[i + 1];
    states_[kRowsOfWarp - 1] = first;
  }

  FOVEA_DEVICE_MEMBER static bool has_columns() { return ptx::lane_idx() * 4 < spec.head_dim_v; }
  FOVEA_DEVICE_MEMBER static ptx::F32x4* columns_of(const Row& r) {
    return reinterpret_cast<ptx::F32x4*>(r.out()) + ptx::lane_idx();
  }

  State states_[kRowsOfWarp];
};

}  // namespace fovea::cuda::sm90::decoding
