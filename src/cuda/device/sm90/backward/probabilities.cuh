// From scores to probabilities and to their gradients, and what rows do not see. Called by key_gradients.cuh.
#pragma once

#include "common/float_constants.cuh"
#include "common/position.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/ordered.cuh"
#include "sm90/backward/cta.cuh"

namespace fovea::cuda::sm90 {

template <Element element>
FOVEA_DEVICE std::uint32_t pair_of(float lo, float hi) {
  if constexpr (element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
  return ptx::cvt_f16x2(lo, hi);
}
template <Element element>
FOVEA_DEVICE float low_of(std::uint32_t pair) {
  if constexpr (element == Element::bf16) return ptx::f32_of_bf16_lo(pair);
  return ptx::f32_of_f16_lo(pair);
}
template <Element element>
FOVEA_DEVICE float high_of(std::uint32_t pair) {
  if constexpr (element == Element::bf16) return ptx::f32_of_bf16_hi(pair);
  return ptx::f32_of_f16_hi(pair);
}

/// Weights of the three numbers that make a row's delta (delta_pieces), f16 for want of range. As the operand of
/// products: every row has them, depth 0, 1 and 2.
template <Element element>
inline constexpr std::uint16_t kDeltaWeights[3] = {0x3f80, 0x3f80, 0x3f80};
template <>
inline constexpr std::uint16_t kDeltaWeights<Element::f16>[3] = {0x6c00, 0x3c00, 0x0c00};

template <Element element>
FOVEA_DEVICE void take_delta_weights(int lane, std::uint32_t (&a)[4]) {
  constexpr const std::uint16_t(&w)[3] = kDeltaWeights<element>;
  const std::uint32_t pair = lane % 4 == 0   ? static_cast<std::uint32_t>(w[0] | w[1] << 16)
                             : lane % 4 == 1 ? static_cast<std::uint32_t>(w[2])
                                             : 0U;
  a[0] = a[1] = pair;
  a[2] = a[3] = 0;
}

/// Of one thread: two keys, 8 apart, and of each 8 rows of queries the two from 2 * (lane % 4) on.
template <Sm90BackwardSpec spec, class Mods>
struct Probabilities {
  using T = BackwardTraits<spec>;
  static constexpr int kNumScores = spec.tile_q / 2;
  using Scores = float[kNumScores];
  /// Pairs of 16 bits, operands of products: 16 rows of queries each.
  using Operand = std::uint32_t[kNumScores / 8][4];
  /// Ahead of the scores, where there are registers for it: a load behind products takes 300 clocks.
  static constexpr bool kLooksAhead = spec.tile_q == 64;

  const BackwardCta<spec>& cta;
  const int group, warp;  // of the CTA, of the group
  ptx::F32x4 log_sums[kLooksAhead ? spec.tile_q / 16 : 1];

  FOVEA_DEVICE_MEMBER Probabilities(const BackwardCta<spec>& of_cta, int of_group, int of_warp)
      : cta(of_cta), group(of_group), warp(of_warp) {}

  FOVEA_DEVICE_MEMBER void look_ahead(int stage) {
    if constexpr (kLooksAhead) {
#pragma unroll
      for (int i = 0; i < spec.tile_q / 16; ++i) log_sums[i] = log_sums_of(stage, i);
    }
  }

  /// P = 2^(c S - log_sum), rounded, of rows [16 first, 16 end).
  template <int first, int end>
  FOVEA_DEVICE_MEMBER void exponentiate(const Scores& s, Operand& p, int stage) const {
    const float c = cta.p.common.forward.softmax_scale_log2;
#pragma unroll
    for (int i = first; i < end; ++i) {
      const ptx::F32x4 l = kLooksAhead ? log_sums[kLooksAhead ? i : 0] : log_sums_of(stage, i);
      const float* x = s + 8 * i;
      p[i][0] = power_pair(x[0], x[1], c, l.x, l.y);
      p[i][1] = power_pair(x[2], x[3], c, l.x, l.y);
      p[i][2] = power_pair(x[4], x[5], c, l.z, l.w);
      p[i][3] = power_pair(x[6], x[7], c, l.z, l.w);
    }
  }

  /// 0, which the compiler does not know, by way of what exponentiate<0, end> made: whatever follows from it comes
  /// behind them.
  template <int end>
  FOVEA_DEVICE_MEMBER std::uint32_t zero_behind(const Operand& p) const {
    std::uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4 * end; ++i) bits ^= p[i / 4][i % 4];
    return bits & cta.p.zero;
  }

  /// dS = P (dP - delta), rounded.
  FOVEA_DEVICE void score_gradients(const Scores& dp, const Operand& p, Operand& ds) {
#pragma unroll
    for (int i = 0; i < kNumScores / 2; ++i) {
      const std::uint32_t pair = p[i / 4][i % 4];
      ds[i / 4][i % 4] = pair_of<spec.element>(low_of<spec.element>(pair) * dp[2 * i],
                                               high_of<spec.element>(pair) * dp[2 * i + 1]);
    }
  }

  /// Where P is 0 because the row does not see the key, whatever dP is.
  FOVEA_DEVICE void hide(Scores& dp, const Operand& p) {
#pragma unroll
    for (int i = 0; i < kNumScores / 2; ++i) {
      const std::uint32_t pair = p[i / 4][i % 4];
      if ((pair & 0xffffU) == 0) dp[2 * i] = 0.0F;
      if ((pair & 0xffff0000U) == 0) dp[2 * i + 1] = 0.0F;
    }
  }

  /// Scores that a row does not see become -inf, whatever they were.
  FOVEA_DEVICE_MEMBER void mask(Scores& s, const PostedQueries& tile) const {
    const OwnedKeys keys = cta.owned();
    if constexpr (spec.hides_keys) {
      mask_pairs(s, tile, keys);
    } else {
      mask_keys(s, keys);
    }
  }

 private:
  /// Keys behind the end. Rows behind the end are zeros, whose log_sum makes P 0.
  FOVEA_DEVICE_MEMBER void mask_keys(Scores& s, const OwnedKeys& keys) const {
    const std::int32_t left = keys.seqlen_kv - first_key(keys);
#pragma unroll
    for (int i = 0; i < kNumScores; ++i)
      if (i / 2 % 2 * 8 >= left) s[i] = -infinity();
  }

  FOVEA_DEVICE_MEMBER std::int32_t first_key(const OwnedKeys& keys) const {
    return keys.kv_begin + 64 * group + 16 * warp + cta.lane / 4;
  }

  FOVEA_DEVICE_MEMBER void mask_pairs(Scores& s, const PostedQueries& tile,
                                      const OwnedKeys& keys) const {
    Position at{};
    at.batch = keys.batch;
    at.q_head = tile.q_head;
    at.kv_head = keys.kv_head;
    at.seqlen_q = keys.seqlen_q;
    at.seqlen_kv = keys.seqlen_kv;
    const std::int32_t first_query = tile.idx() * spec.tile_q + 2 * (cta.lane % 4);
    const Captures& captures = cta.p.common.forward.captures;
#pragma unroll
    for (int i = 0; i < spec.tile_q / 4; ++i) {
      at.q_idx = first_query + 8 * (i / 2) + i % 2;
      std::int32_t first = 0;
      std::int32_t last = at.q_idx < keys.seqlen_q ? keys.seqlen_kv - 1 : -1;
      if constexpr (Mods::has_kv_limits) {
        const std::int32_t of_mask = Mods::kv_last(at, captures).value;
        last = of_mask < last ? of_mask : last;
        first = Mods::kv_first(at, captures).value;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        at.kv_idx = first_key(keys) + 8 * r;
        bool is_visible = at.kv_idx >= first && at.kv_idx <= last;
        if constexpr (Mods::has_mask && !Mods::has_kv_limits)
          is_visible = is_visible && Mods::mask(at, captures);
        if (!is_visible) s[4 * (i / 2) + 2 * r + i % 2] = -infinity();
      }
    }
  }

  /// Of rows 16 i + 2 (lane % 4) + 0, 1, 8, 9.
  FOVEA_DEVICE_MEMBER ptx::F32x4 log_sums_of(int stage, int i) const {
    return ptx::ld_shared<ptx::F32x4>(cta.log_sum_at(stage) + 64 * i + 16 * (cta.lane % 4));
  }

  FOVEA_DEVICE std::uint32_t power_pair(float a, float b, float c, float log_a, float log_b) {
    const float x = ptx::ordered_ex2_approx_ftz(ptx::fma_rn_ftz(a, c, log_a));
    const float y = ptx::ordered_ex2_approx_ftz(ptx::fma_rn_ftz(b, c, log_b));
    if constexpr (spec.element == Element::bf16) return ptx::ordered_cvt_bf16x2(x, y);
    return ptx::ordered_cvt_f16x2(x, y);
  }
};

}  // namespace fovea::cuda::sm90
