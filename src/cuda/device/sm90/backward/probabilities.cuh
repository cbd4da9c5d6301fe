// From scores to probabilities and to their gradients: programs, what rows do not see, what is dropped. Called by
// key_gradients.cuh.
#pragma once

#include "common/dropout.cuh"
#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/position.cuh"
#include "common/program_parts.cuh"
#include "common/score.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/ordered.cuh"
#include "sm90/backward/cta.cuh"

namespace fovea::cuda::sm90 {

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
///
/// Gradients of scores are weighted by P: by the operand that dv is multiplied with. Where a program has a slope, or
/// some of P is dropped, the two differ, and weights have registers of their own; dS takes their place.
template <Sm90BackwardSpec spec, class Mods>
struct Probabilities {
  using T = BackwardTraits<spec>;
  static constexpr int kNumScores = spec.tile_q / 2;
  using Scores = float[kNumScores];
  /// Pairs of 16 bits, operands of products: 16 rows of queries each.
  using Operand = std::uint32_t[kNumScores / 8][4];
  /// Evaluated score by score: a program that adds no line along the keys.
  static constexpr bool kHasProgram = Mods::has_score && !Mods::has_score_slope;
  static constexpr bool kHasWeights = Mods::has_score_derivative || spec.has_dropout;
  static_assert(spec.spares_registers || !kHasWeights, "weights are registers beside P and dP");
  static_assert(spec.tile_q == 64 || !spec.spares_registers,
                "of 128 queries there are too many scores");
  /// dv is computed before dP, which then has the registers of P.
  static constexpr bool kIsDvFirst = spec.spares_registers && spec.head_dim_qk == 128;
  static constexpr bool kAwaitsDv = T::kHasAside || kIsDvFirst;
  /// Powers of so many 16 rows come ahead of dP, the others beside it, as registers allow; f16 takes more of them.
  static constexpr bool kIsF16 = spec.element == Element::f16;
  static constexpr int kPowersAhead = spec.tile_q == 64 ? (T::kHasAside && kIsF16 ? 2 : 0)
                                      : T::kHasAside    ? (kIsF16 ? 6 : 4)
                                                        : (kIsF16 ? 4 : 0);
  /// Ahead of the scores, where there are registers for it: a load behind products takes 300 clocks.
  static constexpr bool kLooksAhead = spec.tile_q == 64 && !kIsDvFirst;

  const BackwardCta<spec>& cta;
  const int group, warp;  // of the CTA, of the group
  ptx::F32x4 log_sums[kLooksAhead ? spec.tile_q / 16 : 1];
  std::uint32_t dropped;  // has_dropout: a bit of each score

  FOVEA_DEVICE_MEMBER Probabilities(const BackwardCta<spec>& of_cta, int of_group, int of_warp)
      : cta(of_cta), group(of_group), warp(of_warp) {}

  FOVEA_DEVICE_MEMBER void look_ahead(int stage) {
    if constexpr (kLooksAhead) {
#pragma unroll
      for (int i = 0; i < spec.tile_q / 16; ++i) log_sums[i] = log_sums_of(stage, i);
    }
  }

  /// Which scores of a tile are dropped: drawn while they are multiplied.
  FOVEA_DEVICE_MEMBER void draw(const PostedTile& tile) {
    if constexpr (spec.has_dropout) dropped = dropped_scores(first_position(tile, cta.owned()));
  }

  /// P = 2^(score - log_sum), rounded, of rows [16 first, 16 end).
  template <int first, int end>
  FOVEA_DEVICE_MEMBER void exponentiate(const Scores& s, const PostedTile& tile, int stage,
                                        Operand& p, Operand& weights) const {
    if constexpr (first == end) return;
    Position at{};
    if constexpr (Mods::has_score) at = first_position(tile, cta.owned());
#pragma unroll
    for (int i = first; i < end; ++i) {
      const ptx::F32x4 l = kLooksAhead ? log_sums[kLooksAhead ? i : 0] : log_sums_of(stage, i);
      const RowTerms log_sum = {l.x, l.y, l.z, l.w};
      if constexpr (kHasProgram) {
        const float scale = cta.p.common.forward.softmax_scale;
        exponentiate_program(
            s, at, i, spec.spares_registers && i > first ? behind(scale, p[i - 1][3]) : scale,
            log_sum, p, weights);
      } else if constexpr (Mods::has_score) {
        exponentiate_line(s, at, i, log_sum, p, weights);
      } else {
        exponentiate_products(s, i, log_sum, log_sum, p, weights);
      }
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

  /// dS = weight (dP - delta), rounded.
  FOVEA_DEVICE void score_gradients(const Scores& dp, const Operand& weights, Operand& ds) {
#pragma unroll
    for (int i = 0; i < kNumScores / 2; ++i) {
      const std::uint32_t pair = weights[i / 4][i % 4];
      ds[i / 4][i % 4] = pair_of<spec.element>(low_of<spec.element>(pair) * dp[2 * i],
                                               high_of<spec.element>(pair) * dp[2 * i + 1]);
    }
  }

  /// From dout v to dP - delta: has_dropout, where no product can subtract deltas of what is dropped.
  FOVEA_DEVICE_MEMBER void drop(Scores& dp, int stage) const {
    // Another number to the compiler, which would keep the mask of each pair since P was dropped.
    const std::uint32_t bits = dropped ^ cta.p.zero;
#pragma unroll
    for (int i = 0; i < spec.tile_q / 16; ++i) {
      const auto d = ptx::ld_shared<ptx::F32x4>(cta.delta_at(stage) + place_of_rows(i));
      const float minus_delta[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int j = 8 * i; j < 8 * i + 8; ++j) {
        const float kept = is_set(bits, j) ? 0.0F : dp[j];
        dp[j] = ptx::fma_rn_ftz(kept, cta.p.common.forward.dropout_keep_scale,
                                minus_delta[j % 8 / 4 * 2 + j % 2]);
      }
    }
  }

  /// Where the weight is 0 because the row does not see the key, whatever dP is.
  FOVEA_DEVICE void hide(Scores& dp, const Operand& weights) {
#pragma unroll
    for (int i = 0; i < kNumScores / 2; ++i) {
      const std::uint32_t pair = weights[i / 4][i % 4];
      if ((pair & 0xffffU) == 0) dp[2 * i] = 0.0F;
      if ((pair & 0xffff0000U) == 0) dp[2 * i + 1] = 0.0F;
    }
  }

  /// Scores that a row does not see become -inf, whatever they were.
  FOVEA_DEVICE_MEMBER void mask(Scores& s, const PostedTile& tile) const {
    const OwnedKeys keys = cta.owned();
    if constexpr (Mods::has_mask_parts) {
      mask_by_parts(s, tile, keys);
    } else if constexpr (spec.hides_keys || Mods::has_score) {
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

  /// Of the thread's first row and first key.
  FOVEA_DEVICE_MEMBER Position first_position(const PostedTile& tile, const OwnedKeys& keys) const {
    return {keys.batch,      tile.q_head,
            keys.kv_head,    tile.idx() * spec.tile_q + 2 * (cta.lane % 4),
            first_key(keys), keys.seqlen_q,
            keys.seqlen_kv};
  }

  FOVEA_DEVICE_MEMBER void mask_pairs(Scores& s, const PostedTile& tile,
                                      const OwnedKeys& keys) const {
    Position at = first_position(tile, keys);
    const std::int32_t first_query = at.q_idx;
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

  /// What the mask loads by a row or a key alone is loaded once for each (program_parts.cuh).
  FOVEA_DEVICE_MEMBER void mask_by_parts(Scores& s, const PostedTile& tile,
                                         const OwnedKeys& keys) const {
    using Pairs = SeenPairs<Mods, spec.tile_q, WalkAxis::queries>;
    const Captures& captures = cta.p.common.forward.captures;
    const auto pairs = Pairs::of(first_position(tile, keys), tile.idx() * spec.tile_q, captures);
#pragma unroll
    for (int chunk = 0; chunk < spec.tile_q / 32; ++chunk) {
      const std::uint32_t seen = pairs.bits(chunk, captures);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (!is_set(seen, i)) s[16 * chunk + i] = -infinity();
    }
  }

  /// Rows 16 i + 2 (lane % 4) + 0, 1, 8, 9 stand side by side (Sm90BackwardRows).
  FOVEA_DEVICE_MEMBER SharedAddress place_of_rows(int i) const {
    return 64 * i + 16 * (cta.lane % 4);
  }
  FOVEA_DEVICE_MEMBER ptx::F32x4 log_sums_of(int stage, int i) const {
    return ptx::ld_shared<ptx::F32x4>(cta.log_sum_at(stage) + place_of_rows(i));
  }

  // ---- powers of 16 rows: eight scores, pairs of which are of two rows and one key ----

  /// What is added to scores of those four rows and one key.
  struct RowTerms {
    float row[4];
  };

  FOVEA_DEVICE_MEMBER void exponentiate_products(const Scores& s, int i, const RowTerms& of_key,
                                                 const RowTerms& of_other_key, Operand& p,
                                                 Operand& weights) const {
    const float c = cta.p.common.forward.softmax_scale_log2;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float* const x = s + 8 * i + 2 * pair;
      const float* const term = (pair % 2 == 0 ? of_key : of_other_key).row + pair / 2 * 2;
      set_pair(i, pair, power(x[0], c, term[0]), power(x[1], c, term[1]), p, weights);
    }
  }

  /// The program adds a line along the keys: its value at one key, and its slope, once for a row.
  FOVEA_DEVICE_MEMBER void exponentiate_line(const Scores& s, Position at, int i,
                                             const RowTerms& log_sum, Operand& p,
                                             Operand& weights) const {
    const Captures& captures = cta.p.common.forward.captures;
    const std::int32_t first_query = at.q_idx;
    RowTerms of_key, of_other_key;
#pragma unroll
    for (int row = 0; row < 4; ++row) {
      at.q_idx = first_query + 16 * i + row / 2 * 8 + row % 2;
      of_key.row[row] = ptx::fma_rn(Mods::score(0.0F, at, captures), kLog2E, log_sum.row[row]);
      of_other_key.row[row] =
          ptx::fma_rn(Mods::score_slope(at, captures), 8 * kLog2E, of_key.row[row]);
    }
    exponentiate_products(s, i, of_key, of_other_key, p, weights);
  }

  FOVEA_DEVICE_MEMBER void exponentiate_program(const Scores& s, Position at, int i, float scale,
                                                const RowTerms& log_sum, Operand& p,
                                                Operand& weights) const {
    const std::int32_t first_query = at.q_idx, first_key = at.kv_idx;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float x[2], slope[2];
      at.kv_idx = first_key + pair % 2 * 8;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        at.q_idx = first_query + 16 * i + pair / 2 * 8 + e;
        const Score score = seen_score(s[8 * i + 2 * pair + e], scale, at);
        x[e] = power(score.value, kLog2E, log_sum.row[pair / 2 * 2 + e]);
        slope[e] = score.slope;
      }
      set_pair(i, pair, x[0], x[1], p, weights, slope[0], slope[1]);
    }
  }

  /// What is hidden stays hidden, whatever a program makes of it.
  FOVEA_DEVICE_MEMBER Score seen_score(float product, float scale, const Position& at) const {
    const Score score = score_of<Mods>(product * scale, at, cta.p.common.forward.captures);
    return product == -infinity() ? Score{-infinity(), 0.0F} : score;
  }

  /// x, which is there when `bits` are: programs of all scores at once would take more registers than there are.
  FOVEA_DEVICE_MEMBER float behind(float x, std::uint32_t bits) const {
    return ptx::bit_cast<float>(ptx::bit_cast<std::uint32_t>(x) ^ (bits & cta.p.zero));
  }

  FOVEA_DEVICE float power(float score, float c, float log_sum) {
    return ptx::ordered_ex2_approx_ftz(ptx::fma_rn_ftz(score, c, log_sum));
  }

  FOVEA_DEVICE_MEMBER void set_pair(int i, int pair, float x, float y, Operand& p, Operand& weights,
                                    float slope_x = 1.0F, float slope_y = 1.0F) const {
    p[i][pair] = ordered_pair(x, y);
    if constexpr (Mods::has_score_derivative) {
      weights[i][pair] = ordered_pair(x * slope_x, y * slope_y);
    } else if constexpr (spec.has_dropout) {
      weights[i][pair] = p[i][pair];
    }
    if constexpr (spec.has_dropout) {
      const int at = 8 * i + 2 * pair;
      p[i][pair] &=
          (is_set(dropped, at) ? 0U : 0xffffU) | (is_set(dropped, at + 1) ? 0U : 0xffff0000U);
    }
  }

  FOVEA_DEVICE std::uint32_t ordered_pair(float lo, float hi) {
    if constexpr (spec.element == Element::bf16) return ptx::ordered_cvt_bf16x2(lo, hi);
    return ptx::ordered_cvt_f16x2(lo, hi);
  }

  // ---- what is dropped ----

  FOVEA_DEVICE bool is_set(std::uint32_t bits, int i) {
    return (bits >> static_cast<std::uint32_t>(i) & 1U) != 0;
  }

  /// A bit of each score. Four lanes, 4 apart, have four neighbouring keys of the same four scores of 8 rows: each
  /// draws the words of one of these, and they exchange bits.
  FOVEA_DEVICE_MEMBER std::uint32_t dropped_scores(const Position& at) const {
    const ForwardParams& f = cta.p.common.forward;
    const DropoutKeyOf<spec> key = dropout_key<spec>(f);
    const int turn = cta.lane / 4 % 4;
    const std::int32_t group_of_keys = (at.kv_idx + turn / 2 * 8) / 4;
    DroppedBits bits;
#pragma unroll 2
    for (int rows = 0; rows < spec.tile_q; rows += 8)
      bits.draw(f, key, at.batch, at.q_head, at.q_idx + rows + turn % 2, group_of_keys);
    return transposed_bits(transposed_bits(bits.own, 2, cta.lane, 4), 1, cta.lane, 4);
  }
};

}  // namespace fovea::cuda::sm90
