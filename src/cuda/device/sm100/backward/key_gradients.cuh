// dK and dV of the CTA's keys: scores to P, dP to dS, a thread for a key and half of a tile's queries; then the sums,
// from tensor memory to memory. Read query_gradients.cuh for dq.
#pragma once

#include "common/backward_work.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "common/store_eight.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "sm100/backward/cta.cuh"
#include "sm100/backward/probabilities.cuh"
#include "sm90/backward/last_tiles.cuh"

namespace fovea::cuda::sm100 {

template <Sm100BackwardSpec spec, class Mods>
struct KeyGradients {
  using T = BackwardTraits<spec>;
  using Scores = Probabilities<spec, Mods>;
  static constexpr int kChunk = 32;  // queries, or columns, at once
  using Part = float[kChunk];

  const BackwardCta<spec>& cta;
  const BackwardTensorMemory<spec> lanes;
  const int group, warp;  // of the CTA, of the group
  Ring<T::kStages> stages{0};
  Ring<1> tiles{0};  // of the barriers with a phase for each tile

  FOVEA_DEVICE_MEMBER KeyGradients(const BackwardCta<spec>& of_cta,
                                   const BackwardTensorMemory<spec>& memory)
      : cta(of_cta),
        lanes(memory.of_warp(of_cta.warp)),
        group(of_cta.warp / 4),
        warp(of_cta.warp % 4) {}

  FOVEA_DEVICE_MEMBER void run() {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.k_full, 0), 0);
    const bool is_seen = !ptx::vote_any(cta.posted(0).is_none());
    int last = 0;  // of the tiles that it visits
    if (is_seen) {
      last = walk();
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.sums_full, 0), 0);
      ptx::tcgen05_fence_after_thread_sync();
    }
    // A tensor for each group.
    const float scale = cta.p.common.forward.softmax_scale;
    const float value_scale = spec.has_dropout ? cta.p.common.forward.dropout_keep_scale : 1.0F;
    if (group == 0)
      write(cta.p.common.dv, lanes.dv(), cta.p.common.forward.head_dim_v, value_scale, is_seen);
    else
      write(cta.p.common.dk, lanes.dk(), cta.p.common.forward.head_dim_qk, scale, is_seen);
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.memory_read, 0));
    if constexpr (spec.finishes_queries)
      if (is_seen) sm90::LastTiles<spec, Mods>(cta, group, warp, last).run();
  }

 private:
  /// Returns which tile was the last.
  FOVEA_DEVICE_MEMBER int walk() {
    Scores scores(cta);
    for (int i = 0;; ++i) {
      ptx::mbarrier_wait_parity(cta.barrier(T::kAt.q_full, stages.stage), stages.parity);
      const PostedTile tile = cta.posted(i);
      scores.draw(tile);
      const bool is_masked = !ptx::vote_any(tile.is_full());
      const bool is_last = ptx::vote_any(tile.is_last());
      take_scores(scores.s);
      if (is_masked) scores.mask(tile);
      store_probabilities(scores, tile);
      store_score_gradients(scores, is_masked);
      if (is_last) return i;
      stages.advance();
      tiles.advance();
    }
  }

  FOVEA_DEVICE_MEMBER void take_scores(float (&s)[T::kQueries]) const {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.s_full, 0), tiles.parity);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll
    for (int at = 0; at < T::kQueries; at += kChunk)
      ptx::tcgen05_ld_32x32b(reinterpret_cast<Part&>(s[at]), lanes.s(group).plus_columns(at));
    static_assert(T::kQueries == 2 * kChunk);
    ptx::tcgen05_wait_ld(reinterpret_cast<Part&>(s[0]), reinterpret_cast<Part&>(s[kChunk]));
  }

  /// Over the scores, which this thread has: no other reads or writes there.
  FOVEA_DEVICE_MEMBER void store_probabilities(Scores& scores, const PostedTile& tile) const {
#pragma unroll
    for (int chunk = 0; chunk < T::kQueries / kChunk; ++chunk) {
      std::uint32_t p[kChunk / 2];
      scores.exponentiate(tile, stages.stage, chunk, p);
      ptx::tcgen05_st_32x32b(lanes.s(group).plus_columns(chunk * kChunk / 2), p);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    cta.release(cta.barrier(T::kAt.p_full, 0));
  }

  /// Over dP for dK, and to shared memory for dQ: that of the tile before has been read where dP is there.
  FOVEA_DEVICE_MEMBER void store_score_gradients(Scores& scores, bool is_masked) const {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.dout_full, stages.stage), stages.parity);
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.dp_full, 0), tiles.parity);
    ptx::tcgen05_fence_after_thread_sync();
    const typename T::DsTile rows{cta.ds_at(0)};
#pragma unroll
    for (int chunk = 0; chunk < T::kQueries / kChunk; ++chunk) {
      Part dp;
      ptx::tcgen05_ld_32x32b(dp, lanes.dp(group).plus_columns(chunk * kChunk));
      ptx::tcgen05_wait_ld(dp);
      std::uint32_t ds[kChunk / 2];
      scores.score_gradients(dp, stages.stage, chunk, is_masked, ds);
      ptx::tcgen05_st_32x32b(lanes.dp(group).plus_columns(chunk * kChunk / 2), ds);
      constexpr int kChunks = kChunk / 8;  // of 16 bytes
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        ptx::st_shared(rows.chunk(scores.key(), 8 * group + kChunks * chunk + j),
                       ptx::U32x4{ds[4 * j], ds[4 * j + 1], ds[4 * j + 2], ds[4 * j + 3]});
      }
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    ptx::fence_proxy_async_shared_cta();
    cta.release(cta.barrier(T::kAt.ds_full, 0));
    // What is known of the tile's rows has been read.
    if (cta.lane == 0) ptx::mbarrier_arrive(cta.barrier(T::kAt.stage_empty, stages.stage));
  }

  // ---- the end ----

  /// The thread's key, as many columns as the problem has of them. is_seen: else no product has written there.
  FOVEA_DEVICE_MEMBER void write(const GradientParam& to, ptx::TmemAddress from, std::int32_t width,
                                 float factor, bool is_seen) const {
    const OwnedKeys keys = cta.owned();
    const std::int32_t key = keys.kv_begin + 32 * warp + cta.lane;
    const bool exists = to.tensor.data != nullptr && key < keys.seqlen_kv;
    const bool is_aligned = has_aligned_rows(to.tensor);
    const std::int64_t row = (spec.is_varlen ? 0 : keys.batch) * to.tensor.batch_stride +
                             (keys.kv_row + key) * to.tensor.row_stride +
                             keys.kv_head * to.tensor.head_stride;
    float zero = 0;  // NaN where a sum is not finite
#pragma unroll 1
    for (int at = 0; at < spec.head_dim_v; at += kChunk) {
      Part sums{};
      if (is_seen) {
        ptx::tcgen05_ld_32x32b(sums, from.plus_columns(at));
        ptx::tcgen05_wait_ld(sums);
      }
      if constexpr (spec.asks_redo) zero += zero_if_finite(sums);
      if (exists) store(to, row, at, width, is_aligned, sums, factor);
    }
    if (spec.asks_redo && ptx::vote_any(is_nan(zero)) && cta.lane == 0)
      ask_redo<spec.is_varlen, true>(cta.p.common, cta.sequence_of(keys), keys.kv_head,
                                     keys.kv_begin);
  }

  /// Columns from `first` on, times `factor`.
  FOVEA_DEVICE void store(const GradientParam& to, std::int64_t row, int first, std::int32_t width,
                          bool is_aligned, const Part& sums, float factor) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 8) {
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = sums[i + j] * factor;
      const std::int32_t count = least(8, width - (first + i));
      if (count > 0)
        store_eight<spec.element>(to, row + (first + i) * to.tensor.col_stride, is_aligned, count,
                                  x);
    }
  }
};

}  // namespace fovea::cuda::sm100
