// Attention backward by mma.sync in one walk: owners of keys find dq's part of each tile too, and add it up in memory.
// Five products where two walks take seven (sm80/attention_backward.cuh, whose chapters this kernel shares).
//
//   Sᵀ = K Qᵀ, dPᵀ = V dOᵀ     dV += Pᵀ dO, dK += dSᵀ Q     dQ of the tile = dS K, added to f32 sums in memory
//
// Four pairs of warps own 32 keys each. Of a pair, each warp multiplies half of a tile's queries, and sums half of the
// columns of dV and dK: so an operand from shared memory serves 32 rows, where a warp that has all queries and all
// columns of its keys has registers for 16. P and dS change owners through shared memory, where dS waits for dQ, too:
//
//   copies  | 0 |     | 1 |                                            | 2 |               cp.async, a tile ahead
//   a warp   wait, barrier | S dP  P dS | own half of dV dK | barrier | the other half | dQ, additions | wait, ...
//
// A warp multiplies its own pairs, which it has in registers, while others are on their way to the barrier. Nothing
// waits for additions: the next kernel, sm80/backward/finish_queries, makes dq of what they come to. Their order is
// that of arrival, so last bits differ from run to run.
//
// What is hidden has P and dS of 0, and meets NaN and infinity in walked rows, in keys, and in dout: sums that are not
// finite are found at the end and by finish_queries, and their tiles computed again by sm80/attention_backward.
//
// Bound: shared memory, tensor cores close behind it. docs/kernels/attention_backward_sm80.md counts.
#pragma once

#include "common/element_pair.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "shared/backward_params_sm80.h"
#include "sm80/backward/owner.cuh"
#include "sm80/backward/passes.cuh"
#include "sm80/backward/query_sums.cuh"
#include "sm80/backward/store.cuh"
#include "sm80/backward/sums.cuh"
#include "sm80/backward/turns.cuh"

namespace fovea::cuda::sm80 {

/// By turns all walks fall, or are staggered.
template <Sm80BackwardSpec spec, class Mods, bool is_staggered = spec.is_staggered>
struct WalkChoice {
  using Type = OwnerWalk<Mods, true, spec.takes_turns ? WalkOrder::falling : WalkOrder::rising>;
};
template <Sm80BackwardSpec spec, class Mods>
struct WalkChoice<spec, Mods, true> {
  using Type = StaggeredOwnerWalk<spec>;
};

template <Sm80BackwardSpec spec, class Mods>
struct OneWalk {
  using T = BackwardTraits<spec>;
  using Sums = BackwardSums<spec, Mods>;
  using Products = typename Sums::Products;
  using Tiles = typename WalkChoice<spec, Mods>::Type;
  using Queries = QuerySums<spec>;
  using PairRows = typename T::PairRows;
  static_assert(spec.owns_keys && spec.sums_scores && spec.sums_values, "a walk for all three");
  /// P or dS, rounded, as operands: of two blocks side by side rows 0 to 7 and 8 to 15 of the first, then the second.
  using Pairs = std::uint32_t[T::kRowBlocks][T::kSteps][4];
  static constexpr int kAllSteps = T::kSteps * T::kColumnWarps;  // of a tile's queries

  const Sm80OneWalkParams& params;
  const Owner<spec> owner;
  const QueryStatistics<spec> queries;
  Sums sums;

  FOVEA_DEVICE_MEMBER OneWalk(const Sm80OneWalkParams& p, const OwnedTile& tile)
      : params(p), owner(p.common, tile), queries(owner) {}

  // ---- pairs -----------------------------------------------------------------------------------

  /// Rounded, kept, and where others read them.
  FOVEA_DEVICE_MEMBER void pass_on(SharedAddress to, const Products& products, Pairs& pairs) const {
    const int lane = owner.lane;
    const SharedAddress row = PairRows{to}.chunk(owner.row_warp * T::kWarpRows + lane / 4,
                                                 owner.column_warp * T::kBlocks) +
                              lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const two = &products[i][j][half * 2];
          const std::uint32_t pair = pair_of<spec.element>(two[0], two[1]);
          pairs[i][j / 2][j % 2 * 2 + half] = pair;
          ptx::st_shared(PairRows::chunk_ahead(row, j) + (i * 16 + half * 8) * PairRows::kRowPitch,
                         pair);
        }
      }
    }
  }

  /// Of 16 queries, as a warp beside this one has passed them on.
  FOVEA_DEVICE_MEMBER void load_pairs(SharedAddress from, int step,
                                      std::uint32_t (&a)[T::kRowBlocks][4]) const {
    const SharedAddress row =
        PairRows{from}.chunk(owner.row_warp * T::kWarpRows + owner.lane % 16, owner.lane / 16);
#pragma unroll
    for (int i = 0; i < T::kRowBlocks; ++i) {
      const U32x4 x =
          ptx::ldmatrix_x4(PairRows::chunk_ahead(row, 2 * step) + i * 16 * PairRows::kRowPitch);
      a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
    }
  }

  // ---- sums ------------------------------------------------------------------------------------

  /// Pairs of 16 queries times the warp's columns of their rows.
  template <class Rows, int num_blocks>
  FOVEA_DEVICE_MEMBER void add_rows(float (&to)[T::kRowBlocks][num_blocks][4],
                                    const std::uint32_t (&a)[T::kRowBlocks][4],
                                    SharedAddress walked, int step) const {
    const SharedAddress row = Rows::chunk_ahead(
        Rows{walked}.chunk(step * 16 + owner.lane % 16, owner.lane / 16), 2 * owner.column_warp);
#pragma unroll
    for (int j = 0; j < num_blocks; j += 2) {
      const U32x4 x = ptx::ldmatrix_x4_trans(Rows::chunk_ahead(row, j * T::kColumnWarps));
#pragma unroll
      for (int i = 0; i < T::kRowBlocks; ++i) {
        ptx::mma_m16n8k16<spec.element>(to[i][j], a[i], x.x, x.y);
        ptx::mma_m16n8k16<spec.element>(to[i][j + 1], a[i], x.z, x.w);
      }
    }
  }

  FOVEA_DEVICE_MEMBER void add_own(const Pairs& weights, const Pairs& gradients,
                                   SharedAddress walked) {
#pragma unroll
    for (int own = 0; own < T::kSteps; ++own) {
      const int step = owner.column_warp * T::kSteps + own;
      std::uint32_t a[T::kRowBlocks][4];
      const auto take = [&](const Pairs& pairs) {
#pragma unroll
        for (int i = 0; i < T::kRowBlocks; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) a[i][e] = pairs[i][own][e];
      };
      take(weights);
      add_rows<typename T::VRows>(sums.by_value, a, walked + T::kWalkedVAt, step);
      take(gradients);
      add_rows<typename T::QkRows>(sums.by_score, a, walked, step);
    }
  }

  FOVEA_DEVICE_MEMBER void add_others(SharedAddress walked) {
    static_assert((kAllSteps & (kAllSteps - 1)) == 0, "steps go round");
#pragma unroll
    for (int behind = T::kSteps; behind < kAllSteps; ++behind) {
      const int step = (owner.column_warp * T::kSteps + behind) & (kAllSteps - 1);
      std::uint32_t a[T::kRowBlocks][4];
      load_pairs(owner.smem + T::kWeightsAt, step, a);
      add_rows<typename T::VRows>(sums.by_value, a, walked + T::kWalkedVAt, step);
      load_pairs(owner.smem + T::kGradientsAt, step, a);
      add_rows<typename T::QkRows>(sums.by_score, a, walked, step);
    }
  }

  // ---- dq --------------------------------------------------------------------------------------

  using QueryProducts = float[Queries::kRowBlocks][Queries::kBlocks][4];

  /// dS K of the warp's queries and columns. dS lies with keys as rows; as an operand it has queries as rows.
  FOVEA_DEVICE_MEMBER void multiply_keys(QueryProducts& products) const {
    using Rows = JoinedTile<spec.tile_owned, T::kElementBytes * spec.head_dim_qk>;
    const int lane = owner.lane;
    const int row_warp = owner.warp / Queries::kColumnWarps;
    const int column_warp = owner.warp % Queries::kColumnWarps;
    const SharedAddress a_row =
        PairRows{owner.smem + T::kGradientsAt}.chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const SharedAddress b_row =
        Rows::chunk_ahead(Rows{owner.smem}.chunk(lane % 16, lane / 16), 2 * column_warp);
#pragma unroll
    for (int i = 0; i < Queries::kRowBlocks; ++i)
#pragma unroll
      for (int j = 0; j < Queries::kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) products[i][j][e] = 0;
#pragma unroll
    for (int step = 0; step < spec.tile_owned / 16; ++step) {
      std::uint32_t a[Queries::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < Queries::kRowBlocks; ++i) {
        const U32x4 x = ptx::ldmatrix_x4_trans(
            PairRows::chunk_ahead(a_row, row_warp * Queries::kWarpRows / 8 + i * 2) +
            step * 16 * PairRows::kRowPitch);
        a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
      }
#pragma unroll
      for (int j = 0; j < Queries::kBlocks; j += 2) {
        const U32x4 x = ptx::ldmatrix_x4_trans(Rows::chunk_ahead(b_row, j * Queries::kColumnWarps) +
                                               step * 16 * Rows::kRowPitch);
#pragma unroll
        for (int i = 0; i < Queries::kRowBlocks; ++i) {
          ptx::mma_m16n8k16<spec.element>(products[i][j], a[i], x.x, x.y);
          ptx::mma_m16n8k16<spec.element>(products[i][j + 1], a[i], x.z, x.w);
        }
      }
    }
  }

  FOVEA_DEVICE_MEMBER void add_queries(const WalkedTile& tile) const {
    QueryProducts products;
    multiply_keys(products);
    const std::int64_t row =
        statistics_at<spec.is_varlen>(owner.b.rows, owner.owned.sequence, tile.q_head) +
        tile.idx * spec.tile_walked;
    const auto add_up = [&](float* sums_of_dq, auto&& add) {
      float* const to = sums_of_dq + row * spec.head_dim_qk;
#pragma unroll
      for (int i = 0; i < Queries::kRowBlocks; ++i)
#pragma unroll
        for (int j = 0; j < Queries::kBlocks; ++j)
          add(to + typename Queries::Place{owner.warp, i, j}.at(), owner.lane, products[i][j]);
    };
    float* to = params.dq_sums;
    if constexpr (spec.is_staggered) {
      const StaggeredWalk own = staggered_walk<spec>(owner.owned);
      if (own.is_round(tile.idx)) to = params.dq_round_sums;
      if (own.is_first(tile.idx)) return add_up(to, Queries::store);
    }
    add_up(to, Queries::add);
  }

  // ---- the walk --------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void add_tile(const WalkedTile& tile, SharedAddress walked) {
    Pairs weights, gradients;
    {
      Products scores, dweights;
      Sums::template multiply_rows<typename T::QkRows, T::kQkSteps>(owner, scores, owner.smem,
                                                                    walked);
      if (!tile.is_full) Sums::hide(owner, scores, tile);
      Sums::template multiply_rows<typename T::VRows, T::kVSteps>(
          owner, dweights, owner.smem + T::kOwnedVAt, walked + T::kWalkedVAt);
      const SharedAddress statistics = walked + T::kStatisticsAt;
      if (Mods::has_score || !tile.is_full) {
        Sums::template find_pairs<true>(owner, queries, statistics, tile, false, scores, dweights);
      } else {
        Sums::template find_pairs<false>(owner, queries, statistics, tile, false, scores, dweights);
      }
      pass_on(owner.smem + T::kWeightsAt, scores, weights);
      pass_on(owner.smem + T::kGradientsAt, dweights, gradients);
    }
    add_own(weights, gradients, walked);
    if constexpr (spec.takes_turns) {
      if (is_leader()) Turns<spec>::take(params, owner, tile);
    }
    ptx::sync_threads();
    add_others(walked);
    add_queries(tile);
  }

  FOVEA_DEVICE_MEMBER void walk() {
    Tiles tiles(owner.p, owner.owned, spec.tile_owned, spec.tile_walked);
    sums.start();
    if (spec.takes_turns && is_leader()) Turns<spec>::start(owner);
    const WalkedTile tile = owner.next_tile(tiles);
    owner.load_owned();
    owner.for_each_tile(tiles, tile, [this](const WalkedTile& each, SharedAddress walked) {
      add_tile(each, walked);
    });
    if constexpr (spec.takes_turns) {
      ptx::sync_threads();
      if (is_leader()) Turns<spec>::end(params, owner);
    }
  }

  /// The thread that takes turns.
  FOVEA_DEVICE_MEMBER bool is_leader() const { return owner.warp == 0 && owner.lane == 0; }

  FOVEA_DEVICE_MEMBER void run() {
    walk();
    const ForwardParams& p = owner.p;
    store_sums(owner, owner.b.dv, sums.by_value, spec.has_dropout ? p.dropout_keep_scale : 1.0F,
               p.head_dim_v, Pass::all);
    store_sums(owner, owner.b.dk, sums.by_score, p.softmax_scale, p.head_dim_qk, Pass::all);
    if constexpr (spec.asks_redo) {
      const float zero = zero_of(sums.by_score) + zero_of(sums.by_value);
      if (ptx::vote_any(is_nan(zero)) && owner.lane == 0)
        ask_redo<spec.is_varlen, true>(owner.b, owner.owned.sequence, owner.owned.head,
                                       owner.owned.begin);
    }
  }
};

template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward_one_walk(const Sm80OneWalkParams& p) {
  const OwnedTile tile =
      find_tile<spec.is_varlen, true>(p.common, ptx::block_idx().x, spec.tile_owned);
  if (tile.is_nothing) return;
  OneWalk<spec, Mods>(p, tile).run();
}

}  // namespace fovea::cuda::sm80
