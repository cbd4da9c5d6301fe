// Joins partial states as combine.cuh does, bit for bit, where rows are many or splits few: a warp for each row, and the loads of eight
// splits under way at once, beside those of lse. No shared memory, no barrier; a lane keeps the sums that combine.cuh's four warps have.
//
// Bound: memory, splits * head_dim_v * 4 bytes a row. A CTA for each row would wait three times for the L2 cache (length, lse, sums), and
// an SM has room for 8 of them; here it has 32 rows under way, each of which waits twice.
#pragma once

#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "sm80/combine.cuh"

namespace fovea::cuda::sm80 {

/// One row, as all lanes of its warp see it.
template <CombineSpec spec>
struct CombinedRow {
  std::int32_t batch, q_head, q_idx;
  std::int64_t row;
  int count;  // of splits; 0: there is no such row

  FOVEA_DEVICE_MEMBER void find(const CombineParams& p, std::int64_t number) {
    row = number;
    q_idx = static_cast<std::int32_t>(row % p.seqlen_q);
    q_head = static_cast<std::int32_t>(row / p.seqlen_q % p.num_heads_q);
    batch = static_cast<std::int32_t>(row / p.seqlen_q / p.num_heads_q);
    count = row < p.num_rows ? num_splits(seqlen_of_partials(p, batch), spec.most_splits) : 0;
  }

  FOVEA_DEVICE_MEMBER const float* sums(const CombineParams& p, int split) const {
    return p.partial_out + (row * p.max_splits + split) * p.partial_width;
  }

  /// Four columns of this lane.
  FOVEA_DEVICE_MEMBER void store(const CombineParams& p, int col, const ptx::F32x4& values) const {
    const std::int64_t at = batch * p.out.batch_stride + q_idx * p.out.row_stride +
                            q_head * p.out.head_stride + col * p.out.col_stride;
    if constexpr (spec.out_element == Element::f32) {
      auto* const to = static_cast<float*>(const_cast<void*>(p.out.data)) + at;
      const float columns[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (col + i < p.head_dim_v) ptx::st_global(to + i * p.out.col_stride, columns[i]);
    } else {
      store_halves(p, col, at, values);
    }
  }

  FOVEA_DEVICE_MEMBER void store_halves(const CombineParams& p, int col, std::int64_t at,
                                        const ptx::F32x4& values) const {
    auto* const to = static_cast<std::uint16_t*>(const_cast<void*>(p.out.data)) + at;
    const std::uint32_t lo = pack(values.x, values.y), hi = pack(values.z, values.w);
    const bool is_whole = col + 4 <= p.head_dim_v && p.out.col_stride == 1;
    if (is_whole && reinterpret_cast<std::uint64_t>(to) % 8 == 0) {
      ptx::st_global(reinterpret_cast<ptx::U32x2*>(to), ptx::U32x2{lo, hi});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i >= p.head_dim_v) return;
      ptx::st_global(to + i * p.out.col_stride,
                     static_cast<std::uint16_t>((i < 2 ? lo : hi) >> (i % 2 * 16)));
    }
  }

  FOVEA_DEVICE_MEMBER void store_row_values(const CombineParams& p, float lse, float sum) const {
    float greatest = -infinity();
    if constexpr (spec.wants_row_max) {
      const SplitValues parts = load_splits(p.partial_max + row * p.max_splits, count, -infinity());
      greatest = warp_max(ptx::max_ftz(parts.low, parts.high));
      if (ptx::vote_any(is_nan(parts.low) || is_nan(parts.high))) greatest = quiet_nan();
    }
    if (ptx::lane_idx() != 0) return;
    if (p.lse != nullptr) {
      ptx::st_global(p.lse + batch * p.lse_batch_stride + q_head * p.lse_head_stride +
                         q_idx * p.lse_row_stride,
                     lse);
    }
    if constexpr (spec.wants_row_max) {
      ptx::st_global(p.row_max + batch * p.row_max_batch_stride + q_head * p.row_max_head_stride +
                         q_idx * p.row_max_row_stride,
                     is_nan(greatest) ? greatest : finish_row_max(greatest, sum, 1.0F));
    }
  }

 private:
  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    return spec.out_element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
  }
};

template <CombineSpec spec>
struct CombineRows {
  static constexpr int kAtOnce = 8;  // splits whose sums are on their way
  static_assert(kAtOnce % kCombineWarps == 0, "the order of sums is combine.cuh's");

  const CombineParams& p;
  CombinedRow<spec> row;
  SplitValues weights;

  /// Sums of kAtOnce splits, in the columns of this lane.
  struct Parts {
    ptx::F32x4 part[kAtOnce];
  };

  FOVEA_DEVICE_MEMBER explicit CombineRows(const CombineParams& params) : p(params) {}

  FOVEA_DEVICE_MEMBER void run() {
    row.find(p, std::int64_t{ptx::block_idx().x} * kCombineWarps + ptx::warp_idx());
    if (row.count == 0) return;
    if constexpr (spec.is_chained) ptx::griddepcontrol_wait();
    const int col = 4 * ptx::lane_idx();
    Parts parts = load(0, col);
    const float factor = weigh();
    join(parts, col, factor);
    // All lanes, with columns or without: each knows the weights of two splits.
    for (int first = kCombineCols; first < p.partial_width; first += kCombineCols) {
      parts = load(0, first + col);
      join(parts, first + col, factor);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER Parts load(int first, int col) const {
    Parts parts;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      parts.part[i] = {0, 0, 0, 0};
      if (first + i < row.count && col < p.partial_width) {
        parts.part[i] =
            ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(row.sums(p, first + i) + col));
      }
    }
    return parts;
  }

  /// What sums are multiplied by at the end; writes lse and row_max.
  FOVEA_DEVICE_MEMBER float weigh() {
    const SplitValues lse =
        load_splits(p.partial_lse + row.row * p.max_splits, row.count, -infinity());
    const float sink =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + row.q_head * p.sinks_stride);
    const float top = warp_max(ptx::max_ftz(lse.low, lse.high));
    weights = {weight_of(lse.low, top), weight_of(lse.high, top)};
    const float sum = warp_sum(weights.low + weights.high);
    const RowResult result = finish_row({top, sum}, 1.0F, sink);
    row.store_row_values(p, result.lse, sum);
    return result.factor;
  }

  FOVEA_DEVICE_MEMBER void join(Parts parts, int col, float factor) const {
    ptx::F32x4 sums[kCombineWarps] = {};
    for (int first = 0; first < row.count; first += kAtOnce) {
      if (first > 0) parts = load(first, col);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = weights.of(first + i);  // 0 behind the last
        const ptx::F32x4& part = parts.part[i];
        ptx::F32x4& sum = sums[i % kCombineWarps];
        if (weight == 0) continue;  // an empty split's sums are not looked at
        sum = {ptx::fma_rn(weight, part.x, sum.x), ptx::fma_rn(weight, part.y, sum.y),
               ptx::fma_rn(weight, part.z, sum.z), ptx::fma_rn(weight, part.w, sum.w)};
      }
    }
    ptx::F32x4 total{0, 0, 0, 0};
#pragma unroll
    for (const ptx::F32x4& sum : sums)
      total = {total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w};
    if (col < p.head_dim_v) {
      row.store(p, col, {total.x * factor, total.y * factor, total.z * factor, total.w * factor});
    }
  }
};

template <CombineSpec spec>
FOVEA_DEVICE void combine_rows(const CombineParams& p) {
  CombineRows<spec>(p).run();
}

}  // namespace fovea::cuda::sm80
