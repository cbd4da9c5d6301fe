// Joins the partial states that sm80/attention_forward or sm90/decode wrote for the splits of a sequence:
//
//   out = Σ_s exp(lse_s - lse) out_s,  lse = log Σ_s exp(lse_s)
//
// One CTA for each row. Its warps take every fourth split, so that many loads are under way, and add up in the order of warps: the
// same bits in every run. Bound: memory, splits * head_dim_v * 4 bytes a row, which the L2 cache still holds.
#pragma once

#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "shared/split.h"

namespace fovea::cuda::sm80 {

inline constexpr int kCombineWarps = 4;
/// Columns that a warp's lanes hold, four each.
inline constexpr int kCombineCols = 128;

FOVEA_DEVICE float warp_max(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = ptx::max_ftz(x, ptx::shfl_bfly(x, mask));
  return x;
}

FOVEA_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x += ptx::shfl_bfly(x, mask);
  return x;
}

/// Of two splits in each lane: split lane and split lane + 32.
struct SplitValues {
  float low, high;

  FOVEA_DEVICE_MEMBER float of(int split) const {
    const float from_low = ptx::shfl_idx(low, split % 32);
    const float from_high = ptx::shfl_idx(high, split % 32);
    return split < 32 ? from_low : from_high;
  }
};

FOVEA_DEVICE SplitValues load_splits(const float* from, int count, float otherwise) {
  static_assert(kMostSplits == 64, "a lane holds two splits");
  const int lane = ptx::lane_idx();
  return {lane < count ? ptx::ld_global(from + lane) : otherwise,
          lane + 32 < count ? ptx::ld_global(from + lane + 32) : otherwise};
}

/// exp(lse - top); 0 for a split that saw no key.
FOVEA_DEVICE float weight_of(float lse, float top) {
  return lse == -infinity() ? 0.0F : ptx::ex2_approx_ftz((lse - top) * kLog2E);
}

/// Keys of the sequence, as those had it who wrote its partial states.
FOVEA_DEVICE int seqlen_of_partials(const CombineParams& p, std::int32_t batch) {
  std::int64_t keys = p.seqlen_kv;
  if (p.seqlens_kv.data != nullptr) {
    keys = index_at(p.seqlens_kv, batch) + p.num_new;
    if (p.left_padding.data != nullptr) keys -= index_at(p.left_padding, batch);
  }
  return static_cast<int>(keys);
}

template <CombineSpec spec>
struct Combine {
  const CombineParams& p;
  std::int32_t batch, q_head, q_idx;
  std::int64_t row;
  int warp, lane;

  FOVEA_DEVICE_MEMBER explicit Combine(const CombineParams& params) : p(params) {
    row = ptx::block_idx().x;
    q_idx = static_cast<std::int32_t>(row % p.seqlen_q);
    q_head = static_cast<std::int32_t>(row / p.seqlen_q % p.num_heads_q);
    batch = static_cast<std::int32_t>(row / p.seqlen_q / p.num_heads_q);
    warp = ptx::warp_idx();
    lane = ptx::lane_idx();
  }

  FOVEA_DEVICE_MEMBER int count_splits() const {
    return num_splits(seqlen_of_partials(p, batch), spec.most_splits);
  }

  FOVEA_DEVICE_MEMBER void store(int col, float value) const {
    const std::int64_t at = batch * p.out.batch_stride + q_idx * p.out.row_stride +
                            q_head * p.out.head_stride + col * p.out.col_stride;
    auto* data = const_cast<void*>(p.out.data);
    if constexpr (spec.out_element == Element::f32) {
      ptx::st_global(static_cast<float*>(data) + at, value);
    } else {
      const std::uint32_t bits = spec.out_element == Element::bf16 ? ptx::cvt_bf16x2(value, 0.0F)
                                                                   : ptx::cvt_f16x2(value, 0.0F);
      ptx::st_global(static_cast<std::uint16_t*>(data) + at, static_cast<std::uint16_t>(bits));
    }
  }

  /// This warp's share of columns col .. col + 3.
  FOVEA_DEVICE_MEMBER ptx::F32x4 sum_splits(const SplitValues& weights, int count, int col) const {
    ptx::F32x4 sum{0, 0, 0, 0};
    const bool exists = col < p.partial_width;
#pragma unroll 4
    for (int split = warp; split < count; split += kCombineWarps) {
      const float weight = weights.of(split);
      if (weight == 0 || !exists) continue;  // an empty split's sums are not looked at
      const auto part = ptx::ld_global(reinterpret_cast<const ptx::F32x4*>(
          p.partial_out + (row * p.max_splits + split) * p.partial_width + col));
      sum = {ptx::fma_rn(weight, part.x, sum.x), ptx::fma_rn(weight, part.y, sum.y),
             ptx::fma_rn(weight, part.z, sum.z), ptx::fma_rn(weight, part.w, sum.w)};
    }
    return sum;
  }

  FOVEA_DEVICE_MEMBER void store_row_values(float lse, int count, float sum) const {
    if (p.lse != nullptr && warp == 0 && lane == 0) {
      ptx::st_global(p.lse + batch * p.lse_batch_stride + q_head * p.lse_head_stride +
                         q_idx * p.lse_row_stride,
                     lse);
    }
    if constexpr (spec.wants_row_max) {
      const SplitValues parts = load_splits(p.partial_max + row * p.max_splits, count, -infinity());
      const float greatest = warp_max(ptx::max_ftz(parts.low, parts.high));
      const bool has_nan = ptx::vote_any(is_nan(parts.low) || is_nan(parts.high));
      if (warp == 0 && lane == 0) {
        ptx::st_global(p.row_max + batch * p.row_max_batch_stride + q_head * p.row_max_head_stride +
                           q_idx * p.row_max_row_stride,
                       has_nan ? quiet_nan() : finish_row_max(greatest, sum, 1.0F));
      }
    }
  }

  FOVEA_DEVICE_MEMBER void run() const {
    const int count = count_splits();
    if constexpr (spec.is_chained) ptx::griddepcontrol_wait();
    const SplitValues lse = load_splits(p.partial_lse + row * p.max_splits, count, -infinity());
    const float top = warp_max(ptx::max_ftz(lse.low, lse.high));
    const SplitValues weights{weight_of(lse.low, top), weight_of(lse.high, top)};
    const float sum = warp_sum(weights.low + weights.high);
    const float sink =
        p.sinks == nullptr ? -infinity() : ptx::ld_global(p.sinks + q_head * p.sinks_stride);
    const RowResult result = finish_row({top, sum}, 1.0F, sink);
    store_row_values(result.lse, count, sum);
    const ptx::SharedAddress smem = ptx::dynamic_shared();
    for (int first = 0; first < p.head_dim_v; first += kCombineCols) {
      const ptx::F32x4 mine = sum_splits(weights, count, first + lane * 4);
      ptx::st_shared(smem + (warp * kCombineCols + lane * 4) * 4, mine);
      ptx::sync_threads();
      const int col = warp * 32 + lane;
      float total = 0;
#pragma unroll
      for (int other = 0; other < kCombineWarps; ++other)
        total += ptx::ld_shared<float>(smem + (other * kCombineCols + col) * 4);
      if (first + col < p.head_dim_v) store(first + col, total * result.factor);
      ptx::sync_threads();
    }
  }
};

template <CombineSpec spec>
FOVEA_DEVICE void combine(const CombineParams& p) {
  Combine<spec>(p).run();
}

}  // namespace fovea::cuda::sm80
