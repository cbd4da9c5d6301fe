// Joins the partial states that the kernels of split problems wrote for the splits of a sequence:
//
//   out = Σ_s exp(lse_s - lse) out_s,  lse = log Σ_s exp(lse_s)
//
// A warp for each row, four columns of a lane. Its splits go to four sums in turn, which are added up in their order:
// the same bits in every run, however many splits are asked for at once. No shared memory, no barrier.
//
// Bound: memory, splits * head_dim_v * 4 bytes a row, which the L2 cache still holds: one wait of some 600 clocks for
// lse and the first sums together, then one for each kAtOnce splits more. Where rows are few, nothing but these waits
// takes time: sixteen splits at once, in 128 registers. Where rows come in waves, or have no more than eight splits,
// eight, in 80. Lengths and sinks are read before the grid ahead has ended.
#pragma once

#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/combine.h"
#include "shared/split.h"

namespace fovea::cuda {

/// Columns that a warp's lanes hold, four each.
inline constexpr int kCombineCols = 4 * ptx::kWarpLanes;
/// Of a row's columns: every so-manieth split is added to the same one.
inline constexpr int kCombineSums = 4;

/// Of two splits in each lane: split lane and split lane + kWarpLanes.
struct SplitValues {
  float low, high;
};

FOVEA_DEVICE SplitValues load_splits(const float* from, int count, float otherwise) {
  static_assert(kMostSplits <= 2 * ptx::kWarpLanes, "a lane holds two splits");
  const int lane = ptx::lane_idx();
  return {
      lane < count ? ptx::ld_global(from + lane) : otherwise,
      lane + ptx::kWarpLanes < count ? ptx::ld_global(from + lane + ptx::kWarpLanes) : otherwise};
}

/// exp(lse - top); 0 for a split that saw no key.
FOVEA_DEVICE float weight_of(float lse, float top) {
  return lse == -infinity() ? 0.0F : ptx::ex2_approx_ftz((lse - top) * kLog2E);
}

/// One row, as all lanes of its warp see it.
template <CombineSpec spec>
struct CombinedRow {
  std::int32_t batch, q_head, q_idx;
  std::int64_t row;            // of partial states
  std::int64_t queries_begin;  // packed: rows of out before the sequence's
  int count;                   // of splits; 0: there is no such row

  /// Pages may be listed whatever the kernel was compiled for: it is asked once.
  static constexpr CacheKind kCombinedCache{true, spec.has_packed_q};

  FOVEA_DEVICE_MEMBER void find(const CombineParams& p, std::int64_t number) {
    row = number;
    batch = static_cast<std::int32_t>(row / p.seqlen_q / p.num_heads_q);
    // Keys of the sequence, as those had it who wrote its partial states.
    count = row < p.num_rows
                ? num_splits(cached_rows<kCombinedCache>(p, batch).count, spec.most_splits)
                : 0;
    q_idx = static_cast<std::int32_t>(row % p.seqlen_q);
    q_head = static_cast<std::int32_t>(row / p.seqlen_q % p.num_heads_q);
    if constexpr (spec.has_packed_q) {
      if (count == 0) return;
      const PackedRows queries = few_queries(p, batch);
      if (q_idx >= queries.count) count = 0;
      queries_begin = queries.begin;
    }
  }

  /// Of the sequence, or of packed rows.
  FOVEA_DEVICE_MEMBER auto out_row() const {
    if constexpr (spec.has_packed_q) {
      return queries_begin + q_idx;
    } else {
      return q_idx;
    }
  }

  FOVEA_DEVICE_MEMBER const float* sums(const CombineParams& p, int split) const {
    return p.partial_out + (row * p.max_splits + split) * p.partial_width;
  }

  /// Four columns of this lane.
  FOVEA_DEVICE_MEMBER void store(const CombineParams& p, int col, const ptx::F32x4& values) const {
    const std::int64_t at = batch * p.out.batch_stride + out_row() * p.out.row_stride +
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

  FOVEA_DEVICE_MEMBER void store_row_values(const CombineParams& p, const SplitValues& lses,
                                            float lse, float sum) const {
    float greatest = -infinity();
    if constexpr (spec.wants_row_max) {
      SplitValues parts = load_splits(p.partial_max + row * p.max_splits, count, -infinity());
      if (is_huge(lses.low)) parts.low = lses.low;
      if (is_huge(lses.high)) parts.high = lses.high;
      greatest = warp_max(ptx::max_ftz(parts.low, parts.high));
      if (ptx::vote_any(is_nan(parts.low) || is_nan(parts.high))) greatest = quiet_nan();
    }
    if (ptx::lane_idx() != 0) return;
    if (p.lse != nullptr) {
      ptx::st_global(p.lse + batch * p.lse_batch_stride + q_head * p.lse_head_stride +
                         out_row() * p.lse_row_stride,
                     lse);
    }
    if constexpr (spec.wants_row_max) {
      ptx::st_global(p.row_max + batch * p.row_max_batch_stride + q_head * p.row_max_head_stride +
                         out_row() * p.row_max_row_stride,
                     is_nan(greatest) ? greatest : finish_row_max(greatest, sum, 1.0F));
    }
  }

 private:
  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    return spec.out_element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
  }
};

/// kAtOnce: splits whose sums are on their way.
template <CombineSpec spec, int kAtOnce>
struct Combine {
  static_assert(kAtOnce % kCombineSums == 0, "which sum a split goes to does not depend on it");
  static_assert(ptx::kWarpLanes % kAtOnce == 0, "their weights are all low or all high");

  const CombineParams& p;
  CombinedRow<spec> row;

  /// Sums of kAtOnce splits, in the columns of this lane.
  struct Parts {
    ptx::F32x4 part[kAtOnce];
  };

  FOVEA_DEVICE_MEMBER explicit Combine(const CombineParams& params) : p(params) {}

  FOVEA_DEVICE_MEMBER void look_up_sink() {
    sink_ =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + row.q_head * p.sinks_stride);
  }

  /// Of one row, whose partial states are there.
  FOVEA_DEVICE_MEMBER void run() {
    lse_ = load_splits(p.partial_lse + row.row * p.max_splits, row.count, -infinity());
    // All lanes, with columns or without: each knows the weights of two splits.
    for (int first = 0; first < p.partial_width; first += kCombineCols) {
      const int col = first + 4 * ptx::lane_idx();
      const ptx::F32x4 sum = join(col, first == 0);
      if (col < p.head_dim_v)
        row.store(p, col, {scaled(sum.x), scaled(sum.y), scaled(sum.z), scaled(sum.w)});
    }
  }

 private:
  /// No load asks: behind the last split it is read again, with weight 0, and columns that a lane does not have are
  /// others. Addresses as integers: of pointers the compiler sums up each one from its parts, and the loads go out one
  /// by one.
  FOVEA_DEVICE_MEMBER Parts load(int first, int col) const {
    const auto from =
        reinterpret_cast<std::uint64_t>(row.sums(p, 0) + (col < p.partial_width ? col : 0));
    const auto row_bytes = static_cast<std::uint32_t>(4 * p.partial_width);
    Parts parts;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto split = static_cast<std::uint32_t>(least(first + i, row.count - 1));
      parts.part[i] = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(
          from + std::uint64_t{split} * std::uint64_t{row_bytes}));
    }
    return parts;
  }

  /// Weights, and what sums are multiplied by at the end; writes lse and row_max.
  FOVEA_DEVICE_MEMBER void weigh() {
    const float top = warp_max(ptx::max_ftz(lse_.low, lse_.high));
    weights_ = {weight_of(lse_.low, top), weight_of(lse_.high, top)};
    if (is_huge(top)) weigh_maxima(top);
    const float sum = warp_sum(weights_.low + weights_.high);
    const RowResult result = finish_row({top, sum}, 1.0F, sink_);
    row.store_row_values(p, lse_, result.lse, sum);
    factor_ = result.factor;
  }

  /// Where lse is the maximum itself, those that have it count by their sums; all others have weight 0 already.
  FOVEA_DEVICE_MEMBER void weigh_maxima(float top) {
    const SplitValues log_sums = load_splits(p.partial_max + row.row * p.max_splits, row.count, 0);
    if (lse_.low == top) weights_.low = ptx::ex2_approx_ftz(log_sums.low * kLog2E);
    if (lse_.high == top) weights_.high = ptx::ex2_approx_ftz(log_sums.high * kLog2E);
  }

  /// Weights are computed while the first sums are under way. It is a branch for the compiler's sake, which else asks
  /// for some of the sums behind the weights, one wait later.
  FOVEA_DEVICE_MEMBER ptx::F32x4 join(int col, bool has_no_weights) {
    ptx::F32x4 sums[kCombineSums] = {};
#pragma unroll 1
    for (int first = 0; first < row.count; first += kAtOnce) {
      const Parts parts = load(first, col);
      if (first == 0 && has_no_weights) weigh();
      const float of_these = first < ptx::kWarpLanes ? weights_.low : weights_.high;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // 0 behind the last.
        const float weight = ptx::shfl_idx(of_these, first % ptx::kWarpLanes + i);
        const ptx::F32x4& part = parts.part[i];
        ptx::F32x4& sum = sums[i % kCombineSums];
        if (weight == 0) continue;  // an empty split's sums are not looked at
        sum = {ptx::fma_rn(weight, part.x, sum.x), ptx::fma_rn(weight, part.y, sum.y),
               ptx::fma_rn(weight, part.z, sum.z), ptx::fma_rn(weight, part.w, sum.w)};
      }
    }
    ptx::F32x4 total{0, 0, 0, 0};
#pragma unroll
    for (const ptx::F32x4& sum : sums)
      total = {total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w};
    return ptx::vote_any(is_faint(weights_.low, lse_.low) || is_faint(weights_.high, lse_.high))
               ? with_faint_splits(total, col)
               : total;
  }

  /// Did a split see keys, none of which weigh anything beside those of others?
  FOVEA_DEVICE bool is_faint(float weight, float lse) { return weight == 0 && lse != -infinity(); }

  /// Its infinity and NaN count all the same.
  FOVEA_DEVICE_MEMBER ptx::F32x4 with_faint_splits(ptx::F32x4 sum, int col) const {
#pragma unroll 1
    for (int split = 0; split < row.count; ++split) {
      const bool is_low = split < ptx::kWarpLanes;
      const int lane = split % ptx::kWarpLanes;
      const float weight = ptx::shfl_idx(is_low ? weights_.low : weights_.high, lane);
      const float lse = ptx::shfl_idx(is_low ? lse_.low : lse_.high, lane);
      if (!is_faint(weight, lse)) continue;
      const float* const from = row.sums(p, split) + (col < p.partial_width ? col : 0);
      sum = with_non_finite(sum, ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(from)));
    }
    return sum;
  }

  FOVEA_DEVICE bool is_finite(float x) { return x - x == 0.0F; }

  FOVEA_DEVICE ptx::F32x4 with_non_finite(const ptx::F32x4& sum, const ptx::F32x4& part) {
    return {is_finite(part.x) ? sum.x : sum.x + part.x, is_finite(part.y) ? sum.y : sum.y + part.y,
            is_finite(part.z) ? sum.z : sum.z + part.z, is_finite(part.w) ? sum.w : sum.w + part.w};
  }

  /// Beside a large sink too, infinity stays.
  FOVEA_DEVICE_MEMBER float scaled(float sum) const {
    return factor_ == 0.0F && !is_finite(sum) ? sum : sum * factor_;
  }

  SplitValues lse_{}, weights_{};
  float sink_ = 0, factor_ = 0;
};

/// A row of each warp of a CTA.
template <CombineSpec spec, int kAtOnce>
FOVEA_DEVICE void combine(const CombineParams& p) {
  Combine<spec, kAtOnce> mine(p);
  mine.row.find(p, std::int64_t{ptx::block_idx().x} * (ptx::block_dim().x / ptx::kWarpLanes) +
                       ptx::warp_idx());
  if (mine.row.count == 0) return;
  mine.look_up_sink();
  if constexpr (spec.is_chained) ptx::griddepcontrol_wait();
  mine.run();
}

}  // namespace fovea::cuda
