// dv and dk of 64 keys: a group each. Scores are transposed, so that P and dS are operands in registers as they are.
// Read queries.cuh for dq.
//
// The group of dv finds P and passes on, thread to thread, as its registers are, what weighs gradients of scores. It is
// a tile or two ahead of the group of dk.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward/wide/cta.cuh"
#include "sm90/backward/wide/pairs.cuh"

namespace fovea::cuda::sm90 {

/// What one thread of the group of dv passes to one of the group of dk: weights of gradients, P program', rounded; with
/// dropout a bit of each score.
template <Sm90WideBackwardSpec spec>
struct PassedWeights {
  using T = WideTraits<spec>;
  const WideCta<spec>& cta;
  Ring<kSm90WidePassed> buffers;

  FOVEA_DEVICE_MEMBER PassedWeights(const WideCta<spec>& of_cta, std::uint32_t first_parity)
      : cta(of_cta), buffers(first_parity) {}

  FOVEA_DEVICE_MEMBER void pass(const std::uint32_t (&weights)[4][4], std::uint32_t dropped) {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.passed_empty, buffers.stage), buffers.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      ptx::st_shared(weights_at(i),
                     ptx::U32x4{weights[i][0], weights[i][1], weights[i][2], weights[i][3]});
    if constexpr (spec.has_dropout) ptx::st_shared(dropped_at(), dropped);
    cta.release(cta.barrier(T::kAt.passed_full, buffers.stage));
    buffers.advance();
  }

  FOVEA_DEVICE_MEMBER void take(std::uint32_t (&weights)[4][4], std::uint32_t& dropped) {
    ptx::mbarrier_wait_parity(cta.barrier(T::kAt.passed_full, buffers.stage), buffers.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto four = ptx::ld_shared<ptx::U32x4>(weights_at(i));
      weights[i][0] = four.x, weights[i][1] = four.y;
      weights[i][2] = four.z, weights[i][3] = four.w;
    }
    if constexpr (spec.has_dropout) dropped = ptx::ld_shared<std::uint32_t>(dropped_at());
    cta.release(cta.barrier(T::kAt.passed_empty, buffers.stage));
    buffers.advance();
  }

 private:
  FOVEA_DEVICE_MEMBER SharedAddress buffer_at() const {
    return cta.smem + T::kAt.passed + buffers.stage * sm90_wide_passed_bytes(spec);
  }
  FOVEA_DEVICE_MEMBER int thread() const { return 32 * (cta.warp % 4) + cta.lane; }
  FOVEA_DEVICE_MEMBER SharedAddress weights_at(int i) const {
    return buffer_at() + 16 * (128 * i + thread());
  }
  FOVEA_DEVICE_MEMBER SharedAddress dropped_at() const {
    return buffer_at() + 16 * 128 * 4 + 4 * thread();
  }
};

/// dv += Pᵀ dout, Pᵀ from Sᵀ = K Qᵀ.
template <Sm90WideBackwardSpec spec, class Mods>
struct WideDv {
  using T = WideTraits<spec>;
  using Pairs = WidePairs<spec, Mods>;
  /// Weights of gradients are not the P that dv is multiplied with.
  static constexpr bool kHasWeights = Mods::has_score_derivative || spec.has_dropout;

  const WideCta<spec>& cta;
  const Pairs pairs;
  PassedWeights<spec> passed;
  Ring<spec.stages> stages{0};
  Ring<spec.v_stages> v_stages{0};
  float dv[spec.head_dim_v / 2];

  FOVEA_DEVICE_MEMBER explicit WideDv(const WideCta<spec>& of_cta)
      : cta(of_cta), pairs(of_cta, 0), passed(of_cta, 1) {}

  FOVEA_DEVICE_MEMBER void run() {
    cta.await_full(T::kAt.owned_qk_full, 0, 0);
    const bool is_seen = !ptx::vote_any(cta.posted(0).is_none());
    if (is_seen) {
      sum();
      pairs.ask_unless_finite(dv);
    }
    const ForwardParams& f = cta.p.common.forward;
    pairs.store(cta.p.common.dv, dv, is_seen, spec.has_dropout ? f.dropout_keep_scale : 1.0F,
                f.head_dim_v);
  }

 private:
  FOVEA_DEVICE_MEMBER void sum() {
    typename Pairs::Scores s;
    typename Pairs::Operand p, weights;
    issue_scores(s);
    for (int i = 0;; ++i) {
      ptx::wgmma_wait_group<0>();
      const PostedTile tile = cta.posted(i);
      const bool is_last = ptx::vote_any(tile.is_last());
      const std::uint32_t dropped = find_weights(s, tile, p, weights);
      cta.release(cta.barrier(T::kAt.qk_empty, stages.stage));
      stages.advance();
      passed.pass(kHasWeights ? weights : p, dropped);
      cta.await_full(T::kAt.v_full, v_stages.stage, v_stages.parity);
      add_rows<T::kType>(dv, p, cta.v(v_stages.stage), i > 0);
      if (is_last) break;
      issue_scores(s);
      ptx::wgmma_wait_group<1>();  // dv
      cta.release(cta.barrier(T::kAt.v_empty, v_stages.stage));
      v_stages.advance();
    }
    ptx::wgmma_wait_group<0>();
  }

  FOVEA_DEVICE_MEMBER void issue_scores(typename Pairs::Scores& s) const {
    cta.await_full(T::kAt.qk_full, stages.stage, stages.parity);
    multiply_rows<T::kType>(s, cta.owned_qk(0), cta.qk(stages.stage));
  }

  /// Of all scores of the tile; which of them are dropped.
  FOVEA_DEVICE_MEMBER std::uint32_t find_weights(typename Pairs::Scores& s, const PostedTile& tile,
                                                 typename Pairs::Operand& p,
                                                 typename Pairs::Operand& weights) const {
    const bool is_masked = !ptx::vote_any(tile.is_full());
    if (is_masked) pairs.hide(s, tile);
    if (Mods::has_score || spec.has_dropout || is_masked)
      return weigh_all<true>(s, tile, p, weights);
    return weigh_all<false>(s, tile, p, weights);
  }

  template <bool selects>
  FOVEA_DEVICE_MEMBER std::uint32_t weigh_all(const typename Pairs::Scores& s,
                                              const PostedTile& tile, typename Pairs::Operand& p,
                                              typename Pairs::Operand& weights) const {
    DropoutKeyOf<spec> key{};
    if constexpr (spec.has_dropout) key = dropout_key<spec>(cta.p.common.forward);
    std::uint32_t all_dropped = 0;
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) {
      const RowTwo rows = rows_of(j);
      const auto [here, scale] =
          pairs.behind(j > 0 ? p[(j - 1) / 2][(j - 1) % 2 * 2 + 1] : 0, tile);
      std::uint32_t dropped = 0;
      if constexpr (spec.has_dropout) {
        dropped = pairs.dropped(key, here, j);
        all_dropped |= dropped << static_cast<std::uint32_t>(4 * j);
      }
      float kept[4], weight[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto of = pairs.template weigh<selects>(s[4 * j + e], scale, rows.row[e % 2],
                                                      pairs.position(here, e / 2, j, e % 2));
        kept[e] = (dropped >> static_cast<std::uint32_t>(e) & 1U) != 0 ? 0.0F : of.weight;
        weight[e] = through_slope(of.weight, of.slope);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = j % 2 * 2 + half;
        p[j / 2][at] = pair_of<spec.element>(kept[2 * half], kept[2 * half + 1]);
        if constexpr (kHasWeights)
          weights[j / 2][at] = pair_of<spec.element>(weight[2 * half], weight[2 * half + 1]);
      }
    }
    return all_dropped;
  }

  /// What is known of the two queries of a column block; delta is the other group's affair.
  struct RowTwo {
    RowStatistic row[2];
  };
  FOVEA_DEVICE_MEMBER RowTwo rows_of(int j) const {
    const SharedAddress at = cta.log_sum_at(stages.stage) + 4 * (8 * j + 2 * (cta.lane % 4));
    const auto log_sum = ptx::ld_shared<ptx::F32x2>(at);
    ptx::F32x2 origin{0, 0};
    if constexpr (spec.has_origins) origin = ptx::ld_shared<ptx::F32x2>(at + 4 * T::kRows);
    return {{{log_sum.x, 0, origin.x}, {log_sum.y, 0, origin.y}}};
  }
};

/// dk += dSᵀ Q, dSᵀ from dPᵀ = V doutᵀ and the weights that are passed.
template <Sm90WideBackwardSpec spec, class Mods>
struct WideDk {
  using T = WideTraits<spec>;
  using Pairs = WidePairs<spec, Mods>;

  const WideCta<spec>& cta;
  const Pairs pairs;
  PassedWeights<spec> passed;
  Ring<spec.stages> stages{0};
  Ring<spec.v_stages> v_stages{0};
  float dk[spec.head_dim_qk / 2];

  FOVEA_DEVICE_MEMBER explicit WideDk(const WideCta<spec>& of_cta)
      : cta(of_cta), pairs(of_cta, 0), passed(of_cta, 0) {}

  FOVEA_DEVICE_MEMBER void run() {
    cta.await_full(T::kAt.owned_v_full, 0, 0);
    const bool is_seen = !ptx::vote_any(cta.posted(0).is_none());
    if (is_seen) {
      sum();
      pairs.ask_unless_finite(dk);
    }
    const ForwardParams& f = cta.p.common.forward;
    pairs.store(cta.p.common.dk, dk, is_seen, f.softmax_scale, f.head_dim_qk);
  }

 private:
  FOVEA_DEVICE_MEMBER void sum() {
    typename Pairs::Scores dp;
    typename Pairs::Operand ds;
    issue_probability_gradients(dp);
    for (int i = 0;; ++i) {
      const PostedTile tile = cta.posted(i);
      const bool is_last = ptx::vote_any(tile.is_last());
      const bool selects = Mods::has_score || !ptx::vote_any(tile.is_full());
      ptx::F32x2 delta[T::kRows / 8];
      read_deltas(delta);
      ptx::wgmma_wait_group<0>();
      cta.release(cta.barrier(T::kAt.v_empty, v_stages.stage));
      v_stages.advance();
      std::uint32_t dropped = 0;
      passed.take(ds, dropped);
      find_gradients(dp, delta, dropped, selects, ds);
      cta.await_full(T::kAt.qk_full, stages.stage, stages.parity);
      add_rows<T::kType>(dk, ds, cta.qk(stages.stage), i > 0);
      if (is_last) break;
      issue_probability_gradients(dp);
      ptx::wgmma_wait_group<1>();  // dk
      cta.release(cta.barrier(T::kAt.qk_empty, stages.stage));
      stages.advance();
    }
    ptx::wgmma_wait_group<0>();
  }

  FOVEA_DEVICE_MEMBER void issue_probability_gradients(typename Pairs::Scores& dp) const {
    cta.await_full(T::kAt.v_full, v_stages.stage, v_stages.parity);
    multiply_rows<T::kType>(dp, cta.owned_v(0), cta.v(v_stages.stage));
  }

  FOVEA_DEVICE_MEMBER void read_deltas(ptx::F32x2 (&delta)[T::kRows / 8]) const {
    const SharedAddress at = cta.delta_at(v_stages.stage) + 4 * 2 * (cta.lane % 4);
#pragma unroll
    for (int j = 0; j < T::kRows / 8; ++j) delta[j] = ptx::ld_shared<ptx::F32x2>(at + 32 * j);
  }

  /// dS = weight (dP - delta), in the place of weights. selects: what has no weight has no gradient, whatever dP is.
  FOVEA_DEVICE_MEMBER void find_gradients(const typename Pairs::Scores& dp,
                                          const ptx::F32x2 (&delta)[T::kRows / 8],
                                          std::uint32_t dropped, bool selects,
                                          typename Pairs::Operand& ds) const {
#pragma unroll
    for (int i = 0; i < T::kNumScores / 2; ++i) {
      std::uint32_t& pair = ds[i / 4][i % 4];
      const float weight[2] = {low_of<spec.element>(pair), high_of<spec.element>(pair)};
      const float minus[2] = {delta[i / 2].x, delta[i / 2].y};
      float gradient[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float dweight = dp[2 * i + e];
        if constexpr (spec.has_dropout) {
          const bool is_dropped = (dropped >> static_cast<std::uint32_t>(2 * i + e) & 1U) != 0;
          dweight = is_dropped ? 0.0F : dweight * cta.p.common.forward.dropout_keep_scale;
        }
        gradient[e] = weight[e] * (dweight - minus[e]);
        if (selects && weight[e] == 0) gradient[e] = 0;
      }
      pair = pair_of<spec.element>(gradient[0], gradient[1]);
    }
  }
};

}  // namespace fovea::cuda::sm90
