// Rows of Q become codes where they have arrived, by the warp that multiplies them: a pass over Q before attention
// would take 35 us beside the 520 of attention at 4,096 keys. Called by code_scores.cuh.
//
//   code = rint(q / scale),  scale = greatest |q| of the row / 127
//
// The four lanes that hold a row's scores round it, each a quarter of its chunks of 8 channels: scales stay in their
// registers. The mean of keys arrives with the rows. What scores lack, q · μ, waits in shared memory for the end of the
// row tile. Sums of values take most registers still: chunks are read twice, for the scale and for the codes, and never
// held.
//
// A row that holds NaN or infinity is not rounded: its scale is 0, its codes are zeros.
#pragma once

#include "common/passes.cuh"
#include "common/round_to_codes.cuh"
#include "common/row_view.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// Of the two rows of a thread's fragments; a scale is above 0, or 0 where the row is not rounded.
struct RoundedRows {
  float scale[2];
  float of_mean[2];  // q · μ, of the mean of keys
};

template <Sm90ForwardSpec spec>
struct QueryCodes {
  using T = Traits<spec>;
  static constexpr int kChunks = spec.head_dim_qk / 32;  // of a lane, of each row

  const ComputingWarp<spec>& warp;
  const int stage;

  /// Those of this warp, which have arrived; before its next product.
  FOVEA_DEVICE_MEMBER RoundedRows round(const Work& work) const {
    RoundedRows rows{};
    float greatest[2] = {};
    bool is_given[2] = {};
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      EightNumbers mu;
      load_mean(i, mu);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const ptx::U32x4 chunk = load(r, i);
        is_given[r] |= has_nonfinite<spec.element>(chunk);
        EightNumbers x;
        unpack<spec.element>(chunk, x);
        greatest[r] = ptx::max_ftz(greatest[r], greatest_of(x));
#pragma unroll
        for (int d = 0; d < 8; ++d) rows.of_mean[r] = ptx::fma_rn(x[d], mu[d], rows.of_mean[r]);
      }
    }
    float reciprocal[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.of_mean[r] = sum_of_row(rows.of_mean[r]);
      greatest[r] = greatest_of_row(greatest[r]);
      is_given[r] = is_any_of_row(is_given[r]);
      if (is_given[r]) rows.of_mean[r] = greatest[r] = 0.0F;
      rows.scale[r] = scale_of_codes(greatest[r]);
      reciprocal[r] = is_given[r] ? 0.0F : ptx::div_rn(1.0F, rows.scale[r]);
      // Rows that there are not do not matter, and are finite.
      if (is_given[r] && exists(work, r)) rows.scale[r] = 0.0F;
      if (warp.cta.lane % 4 == 0)
        ptx::st_shared(warp.cta.of_mean_at(stage, warp.row(r)), rows.of_mean[r]);
    }
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store(r, i, load(r, i), reciprocal[r]);
    }
    ptx::fence_proxy_async_shared_cta();
    return rows;
  }

 private:
  /// Of a row's chunks, the i-th that this lane rounds.
  FOVEA_DEVICE_MEMBER int chunk_of(int i) const { return 4 * i + warp.cta.lane % 4; }
  FOVEA_DEVICE_MEMBER int row_of_group(int r) const {
    return 16 * warp.idx + warp.cta.lane / 4 + 8 * r;
  }
  FOVEA_DEVICE_MEMBER bool exists(const Work& work, int r) const {
    return !work.sequence.is_trailing && RowView<spec>(warp.cta.p.common, work, warp.row(r)).exists;
  }

  FOVEA_DEVICE_MEMBER ptx::U32x4 load(int r, int i) const {
    const typename T::GivenQTile given{warp.cta.q_at(stage, warp.group)};
    return ptx::ld_shared<ptx::U32x4>(given.chunk(row_of_group(r), chunk_of(i)));
  }

  /// Of keys, of the same channels.
  FOVEA_DEVICE_MEMBER void load_mean(int i, EightNumbers& mu) const {
    const SharedAddress from = warp.cta.mean_at(stage, warp.group) + 32 * chunk_of(i);
#pragma unroll
    for (int d = 0; d < 8; d += 4) {
      const auto four = ptx::ld_shared<ptx::F32x4>(from + 4 * d);
      mu[d] = four.x, mu[d + 1] = four.y, mu[d + 2] = four.z, mu[d + 3] = four.w;
    }
  }

  FOVEA_DEVICE_MEMBER bool is_any_of_row(bool is_mine) const {
    return (ptx::ballot(is_mine) >> (warp.cta.lane & ~3) & 0xfU) != 0;
  }

  FOVEA_DEVICE float sum_of_row(float x) {
    x += ptx::shfl_bfly(x, 1);
    return x + ptx::shfl_bfly(x, 2);
  }
  FOVEA_DEVICE float greatest_of_row(float x) {
    x = ptx::max_ftz(x, ptx::shfl_bfly(x, 1));
    return ptx::max_ftz(x, ptx::shfl_bfly(x, 2));
  }

  /// Not finite times 0 is NaN, whose code is 0.
  FOVEA_DEVICE_MEMBER void store(int r, int i, const ptx::U32x4& chunk, float reciprocal) const {
    const typename T::QTile codes{warp.cta.multiplied_q_at(stage, warp.group)};
    EightNumbers x;
    unpack<spec.element>(chunk, x);
    ptx::st_shared(codes.at(row_of_group(r), 8 * chunk_of(i)), codes_of(x, reciprocal));
  }
};

}  // namespace fovea::cuda::sm90
