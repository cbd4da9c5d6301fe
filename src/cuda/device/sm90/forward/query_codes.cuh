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
// Rotated (common/hadamard.cuh), a row is held after all, one of a thread's two at a time: each channel becomes a sum
// of up to all others. Lanes hold neighbouring chunks, so channels 8 and 16 apart are another lane's, those further
// apart another chunk's. q · μ is of the row as given.
//
// A row that holds NaN or infinity is not rounded: its scale is 0, its codes are zeros.
//
// Where rows may be far from 0 (common/code_units.cuh), whichever keys they see, output.cuh is told, and has their row
// tile computed again by a walk that is made for them; or the kernel behind this one is (common/lost_rows.cuh).
#pragma once

#include "common/code_units.cuh"
#include "common/hadamard.cuh"
#include "common/passes.cuh"
#include "common/quad_reduce.cuh"
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

struct RoundedRow {
  float scale, of_mean;
};

template <Sm90ForwardSpec spec>
struct QueryCodes {
  using T = Traits<spec>;
  static constexpr int kChunks = spec.head_dim_qk / 32;  // of a lane, of each row

  const ComputingWarp<spec>& warp;
  const int stage;

  /// Those of this warp, which have arrived; before its next product.
  FOVEA_DEVICE_MEMBER RoundedRows round(const Work& work) const {
    if constexpr (spec.rotates) return round_rotated(work);
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
      rows.of_mean[r] = quad_sum(rows.of_mean[r]);
      greatest[r] = quad_max(greatest[r]);
      is_given[r] = is_any_of_row(is_given[r]);
      if (is_given[r]) rows.of_mean[r] = greatest[r] = 0.0F;
      rows.scale[r] = scale_of_codes(greatest[r]);
      reciprocal[r] = is_given[r] ? 0.0F : ptx::div_rn(1.0F, rows.scale[r]);
      // Rows that there are not do not matter, and are finite.
      if (is_given[r] && exists(work, r)) rows.scale[r] = 0.0F;
      keep_beside(r, {rows.scale[r], rows.of_mean[r]});
    }
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store(r, i, load(r, i), reciprocal[r]);
    }
    keep_has_far(rows);
    ptx::fence_proxy_async_shared_cta();
    return rows;
  }

  /// Given its scale.
  FOVEA_DEVICE_MEMBER bool is_far(float row_scale) const {
    return is_far_row(row_scale * warp.cta.p.common.softmax_scale_log2,
                      ptx::ld_shared<float>(warp.cta.greatest_key_scale_at(stage, warp.group)));
  }

 private:
  FOVEA_DEVICE_MEMBER void keep_has_far(const RoundedRows& rows) const {
    if constexpr (!T::kTakesFarRows) return;
    const std::uint32_t has_far = ptx::vote_any(is_far(rows.scale[0]) || is_far(rows.scale[1]));
    if (warp.cta.lane == 0)
      ptx::st_shared(warp.cta.has_far_at(stage, warp.group, warp.idx), has_far);
  }

  /// And what says whether the row is far, where the kernel behind this one takes such.
  FOVEA_DEVICE_MEMBER void keep_beside(int r, const RoundedRow& row) const {
    if (warp.cta.lane % 4 != 0) return;
    ptx::st_shared(warp.cta.of_mean_at(stage, warp.row(r)), row.of_mean);
    if constexpr (knows_lost_by_scale(spec))
      ptx::st_shared(warp.cta.size_of_row_at(stage, warp.row(r)), row.scale);
  }

  // Note: loops of this are not unrolled, or the compiler holds chunks of both rows at once.

  FOVEA_DEVICE_MEMBER RoundedRows round_rotated(const Work& work) const {
    RoundedRows rows{};
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      float of_mean = 0.0F;
      const bool is_given = look_at_row(r, of_mean);
      EightNumbers x[kChunks];
      load_rotated(r, x);
      float greatest = 0.0F;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) greatest = ptx::max_ftz(greatest, greatest_of(x[i]));
      greatest = quad_max(greatest);  // by all lanes, whichever row is not finite
      if (is_given) greatest = 0.0F;
      const float scale = scale_of_codes(greatest);
      const float reciprocal = is_given ? 0.0F : ptx::div_rn(1.0F, scale);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) store(r, i, x[i], reciprocal);
      // Rows that there are not do not matter, and are finite.
      const RoundedRow row{is_given && exists(work, r) ? 0.0F : scale, is_given ? 0.0F : of_mean};
      keep_beside(r, row);
#pragma unroll
      for (int each = 0; each < 2; ++each) {
        rows.scale[each] = each == r ? row.scale : rows.scale[each];
        rows.of_mean[each] = each == r ? row.of_mean : rows.of_mean[each];
      }
    }
    keep_has_far(rows);
    ptx::fence_proxy_async_shared_cta();
    return rows;
  }

  /// Is it not finite? And what it has of the mean of keys.
  FOVEA_DEVICE_MEMBER bool look_at_row(int r, float& of_mean) const {
    bool is_given = false;
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
      const ptx::U32x4 chunk = load(r, i);
      is_given |= has_nonfinite<spec.element>(chunk);
      EightNumbers x, mu;
      unpack<spec.element>(chunk, x);
      load_mean(i, mu);
#pragma unroll
      for (int d = 0; d < 8; ++d) of_mean = ptx::fma_rn(x[d], mu[d], of_mean);
    }
    of_mean = quad_sum(of_mean);
    return is_any_of_row(is_given);
  }

  FOVEA_DEVICE_MEMBER void load_rotated(int r, EightNumbers (&x)[kChunks]) const {
    const RotationParams& rotation = warp.cta.p.quantized.rotation;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      unpack<spec.element>(load(r, i), x[i]);
      flip_signs(rotation, chunk_of(i), x[i]);
      mix_eight(rotation, x[i]);
      mix_lanes<4>(rotation, x[i]);
    }
#pragma unroll
    for (int apart = 1; apart < kChunks; apart *= 2) {
      if (32 * apart >= rotation.block) break;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        if ((i & apart) != 0) continue;
#pragma unroll
        for (int d = 0; d < 8; ++d) sum_and_difference(x[i][d], x[i + apart][d]);
      }
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) normalize(rotation, x[i]);
  }

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

  /// Not finite times 0 is NaN, whose code is 0.
  FOVEA_DEVICE_MEMBER void store(int r, int i, const ptx::U32x4& chunk, float reciprocal) const {
    EightNumbers x;
    unpack<spec.element>(chunk, x);
    store(r, i, x, reciprocal);
  }
  FOVEA_DEVICE_MEMBER void store(int r, int i, const EightNumbers& x, float reciprocal) const {
    const typename T::QTile codes{warp.cta.multiplied_q_at(stage, warp.group)};
    ptx::st_shared(codes.at(row_of_group(r), 8 * chunk_of(i)), codes_of(x, reciprocal));
  }
};

}  // namespace fovea::cuda::sm90
