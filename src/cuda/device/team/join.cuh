// The sums of several warps over parts of the keys, made those of all: for kernels whose warps have all rows of a CTA.
// Each leaves its rows in shared memory; after a barrier a warp joins one row after the other.
//
//   O = Σ_w exp(m_w - m) O_w,  l = Σ_w exp(m_w - m) l_w
#pragma once

#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "team/team.cuh"

namespace fovea::cuda::team {

/// A row of a part, whole.
struct PartState {
  float origin, sum, row_max;
};

/// exp(m_w - m); 0 for a part that saw no key. c makes scores logarithms to base 2.
FOVEA_DEVICE float weight_of(const PartState& part, float origin, float c) {
  if (part.origin == -infinity()) return is_nan(part.sum) ? 1.0F : 0.0F;
  return ptx::ex2_approx_ftz((part.origin - origin) * c);
}

/// What warps leave: O of a row, then its origin, sum and maximum. Rows are 8 banks apart, so that pairs which
/// neighbouring lanes hold go to different ones.
template <int num_parts, int num_rows, int head_dim_v>
struct Parts {
  static constexpr int kParts = num_parts;
  static constexpr int kRows = num_rows;
  static constexpr int kStateAt = 4 * head_dim_v;
  static constexpr int kRowBytes = kStateAt + 32;
  static constexpr int kPartBytes = kRows * kRowBytes;
  static constexpr int kBytes = num_parts * kPartBytes;
  static_assert(head_dim_v <= 128, "a lane has four columns of a row");

  ptx::SharedAddress base;

  FOVEA_DEVICE_MEMBER ptx::SharedAddress at(int part, int row) const {
    return base + part * kPartBytes + row * kRowBytes;
  }

  /// By one lane of the four that share the row.
  FOVEA_DEVICE_MEMBER void put_state(int part, int row, const RowState& state,
                                     float row_max) const {
    ptx::st_shared(at(part, row) + kStateAt, ptx::F32x4{state.origin, state.sum, row_max, 0.0F});
  }
  FOVEA_DEVICE_MEMBER PartState state(int part, int row) const {
    const auto state = ptx::ld_shared<ptx::F32x4>(at(part, row) + kStateAt);
    return {state.x, state.y, state.z};
  }
};

/// A row at its end, as all lanes of a warp have it; of its columns four of each lane.
struct JoinedRow {
  RowResult result;
  float sum;           // of its weights
  float row_max;       // as callers get it
  ptx::F32x4 columns;  // times result.factor; 0 where the lane has none
  bool is_finite;      // else nothing of it holds
};

template <TeamSpec spec, class Mods, class Parts>
struct Join {
  const Team<spec>& team;
  const Parts parts;

  /// Rows warp, warp + num_warps, ...; careful(row) computes one again whose sums are not finite.
  template <class Careful>
  FOVEA_DEVICE_MEMBER void run(int warp, int num_warps, const Careful& careful) const {
#pragma unroll 1
    for (int row = warp; row < Parts::kRows; row += num_warps) {
      const RowView<spec> r = team.row_at(row);
      if (!r.exists) continue;
      const JoinedRow joined = join(row);
      if (joined.is_finite) {
        store(r, joined);
      } else {
        careful(r);
      }
    }
  }

  FOVEA_DEVICE_MEMBER JoinedRow join(int row) const {
    const ForwardParams& p = team.p;
    const float unit = spec.is_prescaled ? 1.0F : p.softmax_scale;
    const float c = spec.is_prescaled ? kLog2E : p.softmax_scale_log2;
    PartState part[Parts::kParts];
    PartState whole{-infinity(), 0.0F, -infinity()};
#pragma unroll
    for (int i = 0; i < Parts::kParts; ++i) {
      part[i] = parts.state(i, row);
      whole.origin = ptx::max_ftz(whole.origin, part[i].origin);
      whole.row_max = ptx::max_ftz(whole.row_max, part[i].row_max);
    }
    float weights[Parts::kParts];
#pragma unroll
    for (int i = 0; i < Parts::kParts; ++i) {
      weights[i] = weight_of(part[i], whole.origin, c);
      whole.sum = ptx::fma_rn(weights[i], part[i].sum, whole.sum);
    }
    const int col = team.lane * 4;
    ptx::F32x4 sum{0, 0, 0, 0};
    if (col < spec.head_dim_v) sum = join_columns(weights, row, col);
    RowResult result = finish_row({whole.origin, whole.sum}, unit, -infinity());
    if constexpr (spec.has_dropout) result.factor *= p.dropout_keep_scale;
    return {result,
            whole.sum,
            finish_row_max(whole.row_max, whole.sum, unit),
            {sum.x * result.factor, sum.y * result.factor, sum.z * result.factor,
             sum.w * result.factor},
            ptx::vote_all(is_finite(sum))};
  }

  FOVEA_DEVICE_MEMBER void store(const RowView<spec>& r, const JoinedRow& joined) const {
    if (team.lane == 0) r.store_values(joined.result.lse, joined.sum, joined.row_max);
    if (team.lane * 4 < spec.head_dim_v)
      ptx::st_global(reinterpret_cast<ptx::F32x4*>(r.out()) + team.lane, joined.columns);
  }

 private:
  /// Four columns, in the order of warps.
  FOVEA_DEVICE_MEMBER ptx::F32x4 join_columns(const float (&weights)[Parts::kParts], int row,
                                              int col) const {
    ptx::F32x4 sum{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < Parts::kParts; ++i) {
      const auto part = ptx::ld_shared<ptx::F32x4>(parts.at(i, row) + col * 4);
      sum = {ptx::fma_rn(weights[i], part.x, sum.x), ptx::fma_rn(weights[i], part.y, sum.y),
             ptx::fma_rn(weights[i], part.z, sum.z), ptx::fma_rn(weights[i], part.w, sum.w)};
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER static bool is_finite(const ptx::F32x4& x) {
    const float zero =
        ptx::fma_rn(x.x, 0.0F, ptx::fma_rn(x.y, 0.0F, ptx::fma_rn(x.z, 0.0F, x.w * 0.0F)));
    return !is_nan(zero);
  }
};

}  // namespace fovea::cuda::team
