// A tile in a warp's registers: products, programs, probabilities and their gradients, sums. Chapter 2 of
// sm80/attention_backward.cuh; read passes.cuh next.
#pragma once

#include "common/backward_pair.cuh"
#include "common/dropout.cuh"
#include "common/element_pair.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "sm80/backward/owner.cuh"
#include "tile/product.cuh"

namespace fovea::cuda::sm80 {

template <Sm80BackwardSpec spec, class Mods>
struct BackwardSums {
  using T = BackwardTraits<spec>;
  using Products = float[T::kRowBlocks][T::kBlocks][4];

  float by_score[T::kRowBlocks][spec.sums_scores ? T::kQkBlocks : 1][4];  // dk or dq, unscaled
  float by_value[T::kRowBlocks][spec.sums_values ? T::kVBlocks : 1][4];   // dv

  template <int num_blocks>
  FOVEA_DEVICE_MEMBER static void clear(float (&sums)[T::kRowBlocks][num_blocks][4]) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < num_blocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
  }

  FOVEA_DEVICE_MEMBER void start() {
    clear(by_score);
    clear(by_value);
  }

  // ---- products of rows ------------------------------------------------------------------------

  /// Owned rows times walked rows: S, or dP.
  template <class Rows, int num_steps>
  FOVEA_DEVICE_MEMBER static void multiply_rows(const Owner<spec>& owner, Products& products,
                                                SharedAddress owned, SharedAddress walked) {
    const int lane = owner.lane;
    const SharedAddress a_row =
        Rows{owned}.chunk(owner.row_warp * T::kWarpRows + lane % 16, lane / 16);
    const SharedAddress b_row = Rows{walked}.chunk(
        owner.column_warp * T::kBlocks * 8 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    clear(products);
#pragma unroll
    for (int step = 0; step < num_steps; ++step) {
      std::uint32_t a[T::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
        const U32x4 x =
            ptx::ldmatrix_x4(Rows::chunk_ahead(a_row, 2 * step) + i * 16 * Rows::kRowPitch);
        a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
      }
#pragma unroll
      for (int j = 0; j < T::kBlocks; j += 2) {
        const U32x4 x =
            ptx::ldmatrix_x4(Rows::chunk_ahead(b_row, 2 * step) + j * 8 * Rows::kRowPitch);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          multiply_add<spec.element, spec.instructions>(products[i][j], a[i], x.x, x.y);
          multiply_add<spec.element, spec.instructions>(products[i][j + 1], a[i], x.z, x.w);
        }
      }
    }
  }

  /// sums += pairs times walked rows. Two blocks of pairs side by side are one A operand.
  template <class Rows, int num_blocks>
  FOVEA_DEVICE_MEMBER static void add_rows(const Owner<spec>& owner,
                                           float (&sums)[T::kRowBlocks][num_blocks][4],
                                           const Products& pairs, SharedAddress walked) {
    const SharedAddress row = Rows{walked}.chunk(owner.lane % 16, owner.lane / 16);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      std::uint32_t a[T::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* const pair = &pairs[i][step * 2 + e / 2][e % 2 * 2];
          a[i][e] = pair_of<spec.element>(pair[0], pair[1]);
        }
      }
#pragma unroll
      for (int j = 0; j < num_blocks; j += 2) {
        const U32x4 x =
            ptx::ldmatrix_x4_trans(Rows::chunk_ahead(row, j) + step * 16 * Rows::kRowPitch);
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i) {
          multiply_add<spec.element, spec.instructions>(sums[i][j], a[i], x.x, x.y);
          multiply_add<spec.element, spec.instructions>(sums[i][j + 1], a[i], x.z, x.w);
        }
      }
    }
  }

  // ---- pairs -----------------------------------------------------------------------------------

  /// What is hidden gets a product of -inf.
  FOVEA_DEVICE_MEMBER static void hide(const Owner<spec>& owner, Products& products,
                                       const WalkedTile& tile) {
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::int32_t mine = owner.owned_row(i, e / 2);
          const std::int32_t theirs = owner.walked_row(tile, j, e % 2);
          bool is_visible = mine < owner.owned_length() && theirs < owner.walked_length();
          if constexpr (Mods::has_mask) {
            is_visible =
                is_visible && Mods::mask(owner.position(tile, mine, theirs), owner.p.captures);
          }
          if (!is_visible) products[i][j][e] = -infinity();
        }
      }
    }
  }

  /// Of the four accumulators of a block.
  FOVEA_DEVICE_MEMBER static std::uint32_t dropped(const Owner<spec>& owner,
                                                   const DropoutKeyOf<spec>& key,
                                                   const WalkedTile& tile, int i, int j) {
    const std::int32_t batch = owner.owned.sequence.idx;
    const std::int32_t mine = owner.first_owned_row(i);
    const std::int32_t theirs = owner.first_walked_row(tile, j);
    if constexpr (spec.owns_keys)
      return dropped_of_keys(owner.p, key, batch, tile.q_head, theirs, mine);
    return dropped_of_queries(owner.p, key, batch, tile.q_head, mine, theirs);
  }

  /// From q·k and dout·v to P and dS, in place. selects: what is hidden is 0 whatever it holds. indicates: P is 1 where
  /// a pair is visible.
  template <bool selects>
  FOVEA_DEVICE_MEMBER static void find_pairs(const Owner<spec>& owner,
                                             const QueryStatistics<spec>& queries,
                                             SharedAddress statistics, const WalkedTile& tile,
                                             bool indicates, Products& scores, Products& dweights) {
    const ForwardParams& p = owner.p;
    const float c = spec.has_origins ? kLog2E : p.softmax_scale_log2;
    DropoutKeyOf<spec> key{};
    if constexpr (spec.has_dropout) key = dropout_key<spec>(p);
#pragma unroll
    for (int j = 0; j < T::kBlocks; ++j) {
      typename QueryStatistics<spec>::Pair columns{};
      if constexpr (spec.owns_keys)
        columns = QueryStatistics<spec>::of_columns(owner, statistics, j);
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
        std::uint32_t drops = 0;
        if constexpr (spec.has_dropout) drops = dropped(owner, key, tile, i, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const RowStatistic row = spec.owns_keys ? columns.row[e % 2] : queries.of_row(i, e / 2);
          Score score{scores[i][j][e], 1.0F};
          bool is_hidden = selects && score.value == -infinity();
          if constexpr (spec.has_origins) {
            const Position at =
                owner.position(tile, owner.owned_row(i, e / 2), owner.walked_row(tile, j, e % 2));
            score = score_of<Mods>(score.value * p.softmax_scale, at, p.captures);
            is_hidden = is_hidden || score.value == -infinity();
          }
          float weight = weight_of<spec.has_origins>(score.value, row, c);
          if (is_hidden) weight = 0;
          float kept = weight;
          float dweight = spec.sums_scores ? dweights[i][j][e] : 0.0F;
          if constexpr (spec.has_dropout) {
            const bool is_there = (drops >> static_cast<std::uint32_t>(e) & 1U) == 0;
            kept = is_there ? weight : 0.0F;
            dweight = is_there ? dweight * p.dropout_keep_scale : 0.0F;
          }
          if (selects && indicates) kept = is_hidden ? 0.0F : 1.0F;
          scores[i][j][e] = kept;
          if constexpr (spec.sums_scores) {
            float gradient = weight * (dweight - row.delta);
            if (is_hidden) gradient = 0;
            if constexpr (Mods::has_score_derivative)
              gradient = through_slope(gradient, score.slope);
            dweights[i][j][e] = gradient;
          }
        }
      }
    }
  }
};

}  // namespace fovea::cuda::sm80
