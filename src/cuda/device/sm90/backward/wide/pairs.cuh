// Scores of sm90/attention_backward_wide on their way back, and sums on their way out. Read keys.cuh next.
#pragma once

#include "common/backward_pair.cuh"
#include "common/dropout.cuh"
#include "common/element.cuh"
#include "common/element_pair.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "common/program_parts.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/backward/wide/cta.cuh"

namespace fovea::cuda::sm90 {

/// Of one thread of a group: two owned rows, 8 apart, and of each 8 walked rows the two from 2 * (lane % 4) on. Score
/// 4 j + 2 half + e is that of walked rows j, e.
template <Sm90WideBackwardSpec spec, class Mods>
struct WidePairs {
  using T = WideTraits<spec>;
  using Scores = float[T::kNumScores];
  /// Pairs of 16 bits, operands of products: 16 walked rows each.
  using Operand = std::uint32_t[T::kRows / 16][4];

  const WideCta<spec>& cta;
  const std::int32_t first_row;  // of the warp

  /// `group` of owned rows.
  FOVEA_DEVICE_MEMBER WidePairs(const WideCta<spec>& of_cta, int group)
      : cta(of_cta), first_row(of_cta.owned.begin + T::kRows * group + 16 * (of_cta.warp % 4)) {}

  FOVEA_DEVICE_MEMBER std::int32_t owned_row(int half) const {
    return first_row + cta.lane / 4 + 8 * half;
  }
  FOVEA_DEVICE_MEMBER std::int32_t walked_row(const PostedTile& tile, int j, int e) const {
    return tile.idx() * T::kRows + 8 * j + 2 * (cta.lane % 4) + e;
  }

  FOVEA_DEVICE_MEMBER Position position(const PostedTile& tile, int half, int j, int e) const {
    const Sequence& s = cta.owned.sequence;
    const std::int32_t mine = owned_row(half);
    const std::int32_t theirs = walked_row(tile, j, e);
    return {s.idx,
            tile.q_head,
            cta.kv_head(),
            spec.owns_keys ? theirs : mine,
            spec.owns_keys ? mine : theirs,
            s.seqlen_q,
            s.seqlen_kv};
  }

  /// What a row does not see, and what does not exist, gets a product of -inf.
  FOVEA_DEVICE_MEMBER void hide(Scores& products, const PostedTile& tile) const {
    if constexpr (Mods::has_mask_parts) {
      hide_by_parts(products, tile);
      return;
    }
#pragma unroll
    for (int i = 0; i < T::kNumScores; ++i) {
      const int half = i / 2 % 2;
      bool is_visible = owned_row(half) < cta.owned_length() &&
                        walked_row(tile, i / 4, i % 2) < cta.walked_length();
      if constexpr (Mods::has_mask) {
        is_visible = is_visible &&
                     Mods::mask(position(tile, half, i / 4, i % 2), cta.p.common.forward.captures);
      }
      if (!is_visible) products[i] = -infinity();
    }
  }

  /// What the mask loads by a row or a key alone is loaded once for each (program_parts.cuh).
  FOVEA_DEVICE_MEMBER void hide_by_parts(Scores& products, const PostedTile& tile) const {
    using Pairs = SeenPairs<Mods, T::kRows, spec.owns_keys ? WalkAxis::queries : WalkAxis::keys>;
    const Captures& captures = cta.p.common.forward.captures;
    const auto pairs = Pairs::of(position(tile, 0, 0, 0), tile.idx() * T::kRows, captures);
#pragma unroll
    for (int chunk = 0; chunk < T::kRows / 32; ++chunk) {
      const std::uint32_t seen = pairs.bits(chunk, captures);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if ((seen >> static_cast<std::uint32_t>(i) & 1U) == 0)
          products[16 * chunk + i] = -infinity();
    }
  }

  struct Weighed {
    float weight;  // P
    float slope;   // of the score by its scaled product
    bool is_hidden;
  };

  /// selects: a product of -inf is what a row does not see, whatever a program makes of it. `scale`: of softmax.
  template <bool selects>
  FOVEA_DEVICE_MEMBER Weighed weigh(float product, float scale, const RowStatistic& row,
                                    const Position& at) const {
    const ForwardParams& f = cta.p.common.forward;
    Score score{product, 1.0F};
    bool is_hidden = selects && product == -infinity();
    if constexpr (spec.has_origins) {
      score = score_of<Mods>(product * scale, at, f.captures);
      is_hidden = is_hidden || score.value == -infinity();
    }
    const float weight = weight_of<spec.has_origins>(
        score.value, row, spec.has_origins ? kLog2E : f.softmax_scale_log2);
    return {is_hidden ? 0.0F : weight, score.slope, is_hidden};
  }

  /// The tile and the scale of softmax, which are there when `bits` are: programs and words of dropout of all scores at
  /// once would take more registers than there are.
  struct Behind {
    PostedTile tile;
    float scale;
  };
  FOVEA_DEVICE_MEMBER Behind behind(std::uint32_t bits, const PostedTile& tile) const {
    const float scale = cta.p.common.forward.softmax_scale;
    if constexpr (!spec.has_origins && !spec.has_dropout) return {tile, scale};
    const std::uint32_t zero = bits & cta.p.zero;
    return {{tile.word ^ zero, tile.q_head},
            ptx::bit_cast<float>(ptx::bit_cast<std::uint32_t>(scale) ^ zero)};
  }

  /// One bit for each of the four scores of 8 walked rows.
  FOVEA_DEVICE_MEMBER std::uint32_t dropped(const DropoutKeyOf<spec>& key, const PostedTile& tile,
                                            int j) const {
    const ForwardParams& f = cta.p.common.forward;
    const std::int32_t batch = cta.owned.sequence.idx;
    const std::int32_t theirs = tile.idx() * T::kRows + 8 * j;
    if constexpr (spec.owns_keys)
      return dropped_of_keys(f, key, batch, tile.q_head, theirs, first_row);
    return dropped_of_queries(f, key, batch, tile.q_head, first_row, theirs);
  }

  // ---- the end ----

  /// NaN and infinity may have come from what rows do not see: then the tile is computed again.
  template <int n>
  FOVEA_DEVICE_MEMBER void ask_unless_finite(const float (&sums)[n]) const {
    if constexpr (spec.asks_redo) {
      if (ptx::vote_any(is_nan(zero_if_finite(sums))) && cta.lane == 0)
        ask_redo<spec.is_varlen, spec.owns_keys>(cta.p.common, cta.owned.sequence, cta.owned.head,
                                                 cta.owned.begin);
    }
  }

  /// Sums of owned rows, or 0, to memory: where a row's elements are neighbours, by pairs.
  template <int n>
  FOVEA_DEVICE_MEMBER void store(const GradientParam& to, const float (&sums)[n], bool is_seen,
                                 float factor, std::int32_t head_dim) const {
    if (to.tensor.data == nullptr) return;
    const Sequence& s = cta.owned.sequence;
    const BshdParam& t = to.tensor;
    const std::int64_t first = (spec.owns_keys ? s.kv_batch : s.q_batch) * t.batch_stride +
                               (spec.owns_keys ? s.kv_row : s.q_row) * t.row_stride +
                               cta.owned.head * t.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = owned_row(half);
      if (row >= cta.owned_length()) continue;
#pragma unroll
      for (int j = 0; j < n / 4; ++j) {
        const int column = 8 * j + 2 * (cta.lane % 4);
        const float* const two = sums + 4 * j + 2 * half;
        store_two(to, first + row * t.row_stride, column, head_dim,
                  is_seen ? two[0] * factor : 0.0F, is_seen ? two[1] * factor : 0.0F);
      }
    }
  }

 private:
  FOVEA_DEVICE void store_two(const GradientParam& to, std::int64_t row, int column,
                              std::int32_t head_dim, float lo, float hi) {
    void* const data = const_cast<void*>(to.tensor.data);
    if (to.is_aligned != 0 && to.element == spec.element) {
      if (column < head_dim)
        ptx::st_global(
            reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(data) + row + column),
            pair_of<spec.element>(lo, hi));
      return;
    }
    const std::int64_t at = row + column * to.tensor.col_stride;
    if (column < head_dim) store_element(data, to.element, at, lo);
    if (column + 1 < head_dim) store_element(data, to.element, at + to.tensor.col_stride, hi);
  }
};

}  // namespace fovea::cuda::sm90
