// dq of 64 queries: the recurrence of a group over tiles of keys. As forward's, but for a second product that is there
// beside the scores.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/wide/cta.cuh"
#include "sm90/backward/wide/pairs.cuh"

namespace fovea::cuda::sm90 {

/// dq += dS K, dS from S = Q Kᵀ and dP = dout Vᵀ.
template <Sm90WideBackwardSpec spec, class Mods>
struct WideDq {
  using T = WideTraits<spec>;
  using Pairs = WidePairs<spec, Mods>;
  /// Behind programs and words of dropout, which need registers.
  static constexpr bool kIsDpLate = spec.has_origins || spec.has_dropout;

  const WideCta<spec>& cta;
  const int group;
  const Pairs pairs;
  RowStatistic rows[2];  // of the thread's two queries
  Ring<spec.stages> stages{0};
  Ring<spec.v_stages> v_stages{0};
  float dq[spec.head_dim_qk / 2];

  FOVEA_DEVICE_MEMBER explicit WideDq(const WideCta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4), pairs(of_cta, group) {}

  FOVEA_DEVICE_MEMBER void run() {
    read_rows();
    cta.await_full(T::kAt.owned_qk_full, 0, 0);
    const bool is_seen = !ptx::vote_any(cta.posted(0).is_none());
    if (is_seen) {
      sum();
      pairs.ask_unless_finite(dq);
    }
    const ForwardParams& f = cta.p.common.forward;
    pairs.store(cta.p.common.dq, dq, is_seen, f.softmax_scale, f.head_dim_qk);
  }

 private:
  /// Padding makes tiles whole.
  FOVEA_DEVICE_MEMBER void read_rows() {
    const RowStatistics& from = cta.p.common.rows;
    const std::int64_t head =
        statistics_at<spec.is_varlen>(from, cta.owned.sequence, cta.owned.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = head + pairs.owned_row(half);
      rows[half] = {ptx::ld_global(from.log_sum + at), ptx::ld_global(from.delta + at), 0};
      if constexpr (spec.has_origins) rows[half].origin = ptx::ld_global(from.origin + at);
    }
  }

  FOVEA_DEVICE_MEMBER void sum() {
    typename Pairs::Scores s, dp;
    typename Pairs::Operand ds;
    issue_scores(s);
    cta.await_full(T::kAt.owned_v_full, 0, 0);
    for (int i = 0;; ++i) {
      ptx::wgmma_wait_group<1>();  // dq of the tile before, whose operand makes room for dP
      if (i > 0) cta.release(cta.barrier(T::kAt.qk_empty, stage_before()));
      if constexpr (!kIsDpLate) issue_probability_gradients(dp);
      ptx::wgmma_wait_group<kIsDpLate ? 0 : 1>();  // scores
      const PostedTile tile = cta.posted(i);
      const bool is_last = ptx::vote_any(tile.is_last());
      const bool is_masked = !ptx::vote_any(tile.is_full());
      if (is_masked) pairs.hide(s, tile);
      if (kIsDpLate || is_masked) {
        find_gradients<true>(s, dp, tile, ds);
      } else {
        find_gradients<false>(s, dp, tile, ds);
      }
      add_rows<T::kType>(dq, ds, cta.qk(stages.stage), i > 0);
      if (is_last) break;
      stages.advance();
      issue_scores(s);
    }
    ptx::wgmma_wait_group<0>();
  }

  FOVEA_DEVICE_MEMBER int stage_before() const {
    return stages.stage == 0 ? spec.stages - 1 : stages.stage - 1;
  }

  FOVEA_DEVICE_MEMBER void issue_scores(typename Pairs::Scores& s) const {
    cta.await_full(T::kAt.qk_full, stages.stage, stages.parity);
    multiply_rows<T::kType>(s, cta.owned_qk(group), cta.qk(stages.stage));
  }

  FOVEA_DEVICE_MEMBER void issue_probability_gradients(typename Pairs::Scores& dp) const {
    cta.await_full(T::kAt.v_full, v_stages.stage, v_stages.parity);
    multiply_rows<T::kType>(dp, cta.owned_v(group), cta.v(v_stages.stage));
  }

  /// P in the place of scores; then, when dP is there, dS.
  template <bool selects>
  FOVEA_DEVICE_MEMBER void find_gradients(typename Pairs::Scores& s, typename Pairs::Scores& dp,
                                          const PostedTile& tile, typename Pairs::Operand& ds) {
    DropoutKeyOf<spec> key{};
    if constexpr (spec.has_dropout) key = dropout_key<spec>(cta.p.common.forward);
    std::uint32_t dropped = 0, hidden = 0;
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const auto [here, scale] =
          pairs.behind(j > 0 ? ptx::bit_cast<std::uint32_t>(s[4 * j - 1]) : 0, tile);
      if constexpr (spec.has_dropout)
        dropped |= pairs.dropped(key, here, j) << static_cast<std::uint32_t>(4 * j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto of = pairs.template weigh<selects>(s[4 * j + e], scale, rows[e / 2],
                                                      pairs.position(here, e / 2, j, e % 2));
        s[4 * j + e] = through_slope(of.weight, of.slope);
        if (selects && of.is_hidden) hidden |= 1U << static_cast<std::uint32_t>(4 * j + e);
      }
    }
    if constexpr (kIsDpLate) issue_probability_gradients(dp);
    ptx::wgmma_wait_group<0>();
    cta.release(cta.barrier(T::kAt.v_empty, v_stages.stage));
    v_stages.advance();
#pragma unroll
    for (int i = 0; i < T::kNumScores; ++i) {
      const auto bit = static_cast<std::uint32_t>(i);
      float dweight = dp[i];
      if constexpr (spec.has_dropout)
        dweight =
            (dropped >> bit & 1U) != 0 ? 0.0F : dweight * cta.p.common.forward.dropout_keep_scale;
      const float gradient = s[i] * (dweight - rows[i / 2 % 2].delta);
      dp[i] = selects && (hidden >> bit & 1U) != 0 ? 0.0F : gradient;
    }
#pragma unroll
    for (int i = 0; i < T::kNumScores / 2; ++i)
      ds[i / 4][i % 4] = pair_of<spec.element>(dp[2 * i], dp[2 * i + 1]);
  }
};

}  // namespace fovea::cuda::sm90
