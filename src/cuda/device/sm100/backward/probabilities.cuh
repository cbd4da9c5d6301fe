// A thread's scores of a tile: its key, and half of the tile's queries; how they become probabilities, and these the
// weights of gradients. Called by key_gradients.cuh.
//
// All threads of a warp are at the same query at the same time: lse and deltas are broadcast, and what a query alone
// decides of a mask is computed by one lane for all.
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
#include "sm100/backward/cta.cuh"

namespace fovea::cuda::sm100 {

/// Gradients of scores are weighted by P, and where a program has a slope by P times that. What is dropped is left out
/// of the P that dV is multiplied with, not of weights.
template <Sm100BackwardSpec spec, class Mods>
struct Probabilities {
  using T = BackwardTraits<spec>;
  static constexpr int kQueries = T::kQueries;
  /// Evaluated score by score: a program that adds no line along the keys.
  static constexpr bool kHasProgram = Mods::has_score && !Mods::has_score_slope;

  const BackwardCta<spec>& cta;
  const int group, warp;                 // of the CTA, of the group
  float s[kQueries];                     // scores, then weights
  std::uint32_t dropped[kQueries / 32];  // has_dropout: a bit of each

  FOVEA_DEVICE_MEMBER Probabilities(const BackwardCta<spec>& of_cta)
      : cta(of_cta), group(of_cta.warp / 4), warp(of_cta.warp % 4) {}

  /// Of the CTA's.
  FOVEA_DEVICE_MEMBER int key() const { return 32 * warp + cta.lane; }

  /// Which scores of a tile are dropped: drawn while they are multiplied.
  FOVEA_DEVICE_MEMBER void draw(const PostedTile& tile) {
    if constexpr (!spec.has_dropout) return;
    const ForwardParams& f = common();
    const DropoutKeyOf<spec> of_call = dropout_key<spec>(f);
    const Position at = first_position(tile);
    // Four lanes have four neighbouring keys: each draws the words of every fourth query, and they exchange bits.
    const std::int32_t turn = cta.lane % 4;
#pragma unroll
    for (int word = 0; word < kQueries / 32; ++word) {
      DroppedBits bits;
#pragma unroll 1
      for (int i = 0; i < 32; i += 4)
        bits.draw(f, of_call, at.batch, at.q_head, at.q_idx + 32 * word + i + turn, at.kv_idx / 4);
      dropped[word] = transposed_bits(transposed_bits(bits.own, 2, cta.lane, 1), 1, cta.lane, 1);
    }
  }

  /// Scores that a row does not see become -inf, whatever they were.
  FOVEA_DEVICE_MEMBER void mask(const PostedTile& tile) {
    if constexpr (Mods::has_mask_parts) {
      mask_by_parts(tile);
    } else if constexpr (spec.hides_keys || Mods::has_score) {
      mask_pairs(tile);
    } else {
      // Keys behind the end. Rows behind the end are zeros, whose log_sum makes P 0.
      const Position at = first_position(tile);
#pragma unroll
      for (float& x : s) x = at.kv_idx < at.seqlen_kv ? x : -infinity();
    }
  }

  /// P of 32 queries, two a word; weights where scores were.
  FOVEA_DEVICE_MEMBER void exponentiate(const PostedTile& tile, int stage, int chunk,
                                        std::uint32_t (&p)[16]) {
    Position at{};
    if constexpr (Mods::has_score) at = first_position(tile);
    const std::int32_t first_query = at.q_idx;
    std::uint32_t before = 0;  // the last pair
#pragma unroll
    for (int four = 0; four < 8; ++four) {
      const ptx::F32x4 log_sum = four_floats(cta.log_sum_at(stage), chunk, four);
      const float minus_log_sums[4] = {log_sum.x, log_sum.y, log_sum.z, log_sum.w};
      const float scale = scale_behind(before);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int query = first_of(chunk, four) + 8 * pair;
        at.q_idx = first_query + query;
        const float lo = weigh(s[query], at, scale, minus_log_sums[2 * pair]);
        ++at.q_idx;
        const float hi = weigh(s[query + 1], at, scale, minus_log_sums[2 * pair + 1]);
        before = pair_of<spec.element>(lo, hi) & kept(query);
        p[query / 2 % 16] = before;
      }
    }
  }

  /// dS of 32 queries, two a word, from dP. is_masked: where the weight is 0 dP may be anything.
  FOVEA_DEVICE_MEMBER void score_gradients(float (&dp)[32], int stage, int chunk, bool is_masked,
                                           std::uint32_t (&ds)[16]) const {
    if constexpr (spec.has_dropout) drop(dp, chunk);
#pragma unroll
    for (int four = 0; four < 8; ++four) {
      const ptx::F32x4 delta = four_floats(cta.delta_at(stage), chunk, four);
      const float minus_deltas[4] = {delta.x, delta.y, delta.z, delta.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = first_of(chunk, four) + i / 2 * 8 + i % 2;
        dp[query % 32] = s[query] * (dp[query % 32] + minus_deltas[i]);
      }
    }
    if (is_masked) {
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (s[32 * chunk + i] == 0.0F) dp[i] = 0.0F;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) ds[i] = pair_of<spec.element>(dp[2 * i], dp[2 * i + 1]);
  }

 private:
  FOVEA_DEVICE_MEMBER const ForwardParams& common() const { return cta.p.common.forward; }

  /// Of the thread's key and its first query.
  FOVEA_DEVICE_MEMBER Position first_position(const PostedTile& tile) const {
    const OwnedKeys keys = cta.owned();
    return {keys.batch,
            tile.q_head,
            keys.kv_head,
            tile.idx() * spec.tile_q + kQueries * group,
            keys.kv_begin + key(),
            keys.seqlen_q,
            keys.seqlen_kv};
  }

  /// Of each 16 queries those that stand side by side in memory are 2 l, 2 l + 1, 2 l + 8, 2 l + 9 (Sm90BackwardRows).
  FOVEA_DEVICE int first_of(int chunk, int four) {
    return 32 * chunk + four / 4 * 16 + four % 4 * 2;
  }
  FOVEA_DEVICE_MEMBER ptx::F32x4 four_floats(SharedAddress tile, int chunk, int four) const {
    return ptx::ld_shared<ptx::F32x4>(tile + 4 * (kQueries * group + 32 * chunk + 4 * four));
  }

  // ---- one score ----

  /// P; the score becomes the weight of its gradient. What is hidden stays hidden, whatever a program makes of it.
  FOVEA_DEVICE_MEMBER float weigh(float& product, const Position& at, float scale,
                                  float minus_log_sum) const {
    float slope = 1;
    float p;
    if constexpr (kHasProgram) {
      Score score = score_of<Mods>(product * scale, at, common().captures);
      if (product == -infinity()) score = {-infinity(), 0.0F};
      slope = score.slope;
      p = power(score.value, kLog2E, minus_log_sum);
    } else if constexpr (Mods::has_score) {
      // The program adds a line along the keys: its value at this one.
      const float added = Mods::score(0.0F, at, common().captures);
      p = power(product, common().softmax_scale_log2, ptx::fma_rn(added, kLog2E, minus_log_sum));
    } else {
      p = power(product, common().softmax_scale_log2, minus_log_sum);
    }
    product = Mods::has_score_derivative ? p * slope : p;
    return p;
  }

  /// The scale of softmax, which is there when `pair` is: programs of all scores at once would take more registers than
  /// there are.
  FOVEA_DEVICE_MEMBER float scale_behind(std::uint32_t pair) const {
    return ptx::bit_cast<float>(ptx::bit_cast<std::uint32_t>(common().softmax_scale) ^
                                (pair & cta.p.zero));
  }

  FOVEA_DEVICE float power(float score, float c, float minus_log_sum) {
    return ptx::ex2_approx_ftz(ptx::fma_rn_ftz(score, c, minus_log_sum));
  }

  // ---- what is not seen ----

  FOVEA_DEVICE_MEMBER void mask_pairs(const PostedTile& tile) {
    const Captures& captures = common().captures;
    Position at = first_position(tile);
#pragma unroll
    for (int i = 0; i < kQueries; ++i, ++at.q_idx) {
      bool is_visible = at.q_idx < at.seqlen_q && at.kv_idx < at.seqlen_kv;
      if constexpr (Mods::has_kv_limits) {
        is_visible = is_visible && at.kv_idx <= Mods::kv_last(at, captures).value &&
                     at.kv_idx >= Mods::kv_first(at, captures).value;
      } else if constexpr (Mods::has_mask) {
        is_visible = is_visible && Mods::mask(at, captures);
      }
      if (!is_visible) s[i] = -infinity();
    }
  }

  /// What the mask loads by a row or a key alone is loaded once for each: rows by the lanes, 32 at a time.
  FOVEA_DEVICE_MEMBER void mask_by_parts(const PostedTile& tile) {
    using Mask = MaskInParts<Mods>;
    const Captures& captures = common().captures;
    Position at = first_position(tile);
    typename Mask::Key of_key{};
    if constexpr (!__is_empty(typename Mask::Key)) of_key = Mask::key(at, captures);
#pragma unroll
    for (int chunk = 0; chunk < kQueries / 32; ++chunk) {
      typename Mask::Row of_rows{};
      Position of_lane = at;
      of_lane.q_idx += cta.lane;
      if constexpr (!__is_empty(typename Mask::Row)) of_rows = Mask::row(of_lane, captures);
      std::uint32_t seen = 0;
      // A loop, after each round of which the mask's registers are free again.
#pragma unroll 1
      for (int i = 0; i < 32; ++i, ++at.q_idx) {
        const bool is_visible = Mask::value(at, of_key, shuffled(of_rows, i), captures) &&
                                at.q_idx < at.seqlen_q && at.kv_idx < at.seqlen_kv;
        seen |= (is_visible ? 1U : 0U) << static_cast<std::uint32_t>(i);
      }
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!is_set(seen, i)) s[32 * chunk + i] = -infinity();
    }
  }

  // ---- what is dropped ----

  FOVEA_DEVICE bool is_set(std::uint32_t bits, int i) {
    return (bits >> static_cast<std::uint32_t>(i) & 1U) != 0;
  }

  /// The bits that stay of a pair of queries.
  FOVEA_DEVICE_MEMBER std::uint32_t kept(int query) const {
    if constexpr (!spec.has_dropout) return 0xffffffffU;
    const std::uint32_t pair = dropped[query / 32] >> static_cast<std::uint32_t>(query % 32);
    return ((pair & 1U) != 0 ? 0U : 0xffffU) | ((pair & 2U) != 0 ? 0U : 0xffff0000U);
  }

  /// From dout v to dP, whatever dout v is where P is dropped.
  FOVEA_DEVICE_MEMBER void drop(float (&dp)[32], int chunk) const {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      dp[i] = is_set(dropped[chunk], i) ? 0.0F : dp[i] * common().dropout_keep_scale;
  }
};

}  // namespace fovea::cuda::sm100
