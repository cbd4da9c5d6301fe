// Joins states of the same rows over different keys:
//
//   out = Σ_i exp(lse_i - lse) out_i,  lse = log Σ_i exp(lse_i)
//
// A warp for each row: a lane weighs each state, then every lane sums four columns in the order of the states. What a
// lane writes it has read before, so the first state may be the result's place. (combine.cuh joins the partial states
// of one problem, which lie side by side in f32.)
//
// Bound: memory, every state once.
#pragma once

#include "common/columns.cuh"
#include "common/online_softmax.cuh"
#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "ptx/exp_log.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/merge_params.h"

namespace fovea::cuda {

/// What a state without weight adds beside others: nothing, but for infinity and NaN.
FOVEA_DEVICE float weighed(float weight, float value) {
  return weight == 0.0F && value - value != 0.0F ? value : weight * value;
}

/// One row, as all lanes of its warp see it.
struct MergedRow {
  const MergeParams& p;
  std::int32_t batch, head, q_idx;

  FOVEA_DEVICE_MEMBER explicit MergedRow(const MergeParams& params, std::int64_t number)
      : p(params),
        batch(static_cast<std::int32_t>(number / p.num_heads / p.seqlen_q)),
        head(static_cast<std::int32_t>(number % p.num_heads)),
        q_idx(static_cast<std::int32_t>(number / p.num_heads % p.seqlen_q)) {}

  FOVEA_DEVICE_MEMBER std::int64_t place(const StateParam& state) const {
    return row_place(state.out, batch, q_idx, head);
  }
  FOVEA_DEVICE_MEMBER float* lse_of(const StateParam& state) const {
    return state.lse + batch * state.lse_batch_stride + head * state.lse_head_stride +
           q_idx * state.lse_row_stride;
  }

  FOVEA_DEVICE_MEMBER void merge() {
    const float lse = weigh();
    for (int first = 0; first < p.head_dim; first += kColumnsOfWarp) {
      const int col = first + 4 * ptx::lane_idx();
      const int count = least(4, p.head_dim - col);
      const ptx::F32x4 sum = sum_of(col, count);
      if (count > 0) store_columns(p.merged.out, place(p.merged), col, count, sum);
    }
    if (p.merged.lse != nullptr && ptx::lane_idx() == 0) ptx::st_global(lse_of(p.merged), lse);
  }

 private:
  static constexpr int kAtOnce = 4;  // states whose columns are on their way

  /// The weight of this lane's state; returns lse of the whole.
  FOVEA_DEVICE_MEMBER float weigh() {
    const int state = ptx::lane_idx();
    lse_ = state < p.num_states ? ptx::ld_global(lse_of(p.states[state])) : -infinity();
    const float top = ptx::vote_any(is_nan(lse_)) ? quiet_nan() : warp_max(lse_);
    if (top == -infinity()) return top;
    weight_ = lse_ == top ? 1.0F : is_empty(lse_) ? 0.0F : ptx::exp_f32(lse_ - top);
    const float total = warp_sum(weight_);
    weight_ = ptx::div_rn(weight_, total);
    return top + ptx::log_f32(total);
  }

  /// A state that saw no key counts for nothing, whatever its out holds.
  FOVEA_DEVICE bool is_empty(float lse) { return lse == -infinity(); }

  /// Every lane takes part, with columns or without: each knows the weight of a state. The parts of some states are on
  /// their way together; behind the last one it is read again, and not counted.
  FOVEA_DEVICE_MEMBER ptx::F32x4 sum_of(int col, int count) const {
    ptx::F32x4 sum{0, 0, 0, 0};
    bool is_first = true;
#pragma unroll 1
    for (int first = 0; first < p.num_states; first += kAtOnce) {
      ptx::U32x4 parts[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const StateParam& state = p.states[least(first + i, p.num_states - 1)];
        if (count > 0) parts[i] = load_columns(state.out, place(state), col, count);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = ptx::shfl_idx(weight_, first + i);
        const float lse = ptx::shfl_idx(lse_, first + i);
        if (first + i >= p.num_states || is_empty(lse)) continue;
        const ptx::F32x4 part = floats_of(parts[i], p.states[first + i].out.element);
        sum = {added(sum.x, weight, part.x, is_first), added(sum.y, weight, part.y, is_first),
               added(sum.z, weight, part.z, is_first), added(sum.w, weight, part.w, is_first)};
        is_first = false;
      }
    }
    return sum;
  }

  /// The first state is not added to 0: alone, it is copied bit for bit.
  FOVEA_DEVICE float added(float sum, float weight, float part, bool is_first) {
    if (is_first) return weighed(weight, part);
    return weight == 0.0F ? sum + weighed(weight, part) : ptx::fma_rn(weight, part, sum);
  }

  float lse_ = 0, weight_ = 0;
};

/// block_dim.x / 32 rows of a CTA.
FOVEA_DEVICE void merge_states(const MergeParams& p) {
  const std::int64_t row =
      std::int64_t{ptx::block_idx().x} * (ptx::block_dim().x / 32) + ptx::warp_idx();
  if (row < p.num_rows) MergedRow(p, row).merge();
}

}  // namespace fovea::cuda
