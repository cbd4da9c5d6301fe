// Attention backward by mma.sync and cp.async: every tensor-core GPU from sm_80 up, and f16 on Turing, where copies go
// through registers. On Hopper and Blackwell it is the
// fallback that runs everything.
//
//   P = exp(program(scale S) - lse);  dS = P (dP - delta) program'                Dao et al. 2022, appendix B
//   owns keys      Sᵀ = K Qᵀ, dPᵀ = V dOᵀ    dV += Pᵀ dO, dK += dSᵀ Q    over the queries that see them, head by head
//   owns queries   S = Q Kᵀ,  dP = dO Vᵀ     dQ += dS K                  over the keys that they see
//
// One text for both: a CTA owns a tile of rows of one side and walks over tiles of the other. A warp owns 16 or 32 of
// the rows all along. Its products with a walked tile are, rounded, the A operands of its sums as they stand, whichever
// side it owns, so that nothing but walked rows passes through shared memory, and warps meet once for each tile:
//
//   copies   | owned, 0 | 1 |          | 2 |          | 3 |          cp.async, a tile ahead
//   a warp     wait, barrier | S dP  P dS  sums |  wait, barrier | S dP  P dS  sums | ...
//
// Each gradient has one owner, who sums it in the order of the walk: no atomics, no sums in memory, and bits that
// depend on the sequence alone. The price: S and dP are computed by both sides, 7 products where one walk with atomics
// has 5. Heads above 128 leave no registers for both sums of keys: dK and dV have a walk each, 8 products.
//
// Bound: tensor cores at mma.sync's rate with 32 rows a warp; shared memory with 16 rows, which read each walked
// element for half as many products. docs/kernels/attention_backward_sm80.md counts.
//
// Chapters, in backward/; the walk, the end and the entry are here:
//
//   owner.cuh    who owns which rows, where things lie, rows on their way in
//   sums.cuh     a tile in a warp's registers
//   passes.cuh   NaN and infinity in walked rows, which may reach only rows that they see
//   store.cuh    sums on their way out
//
// common/backward_pair.cuh: one score on its way back.
//
// Refused: f32 inputs, dout of another dtype, head dims above 256 (sm80/attention_backward_f32.cuh).
#pragma once

#include "common/passes.cuh"
#include "ptx/griddepcontrol.cuh"
#include "sm80/backward/owner.cuh"
#include "sm80/backward/passes.cuh"
#include "sm80/backward/store.cuh"
#include "sm80/backward/sums.cuh"

namespace fovea::cuda::sm80 {

template <Sm80BackwardSpec spec, class Mods>
struct Backward {
  using T = BackwardTraits<spec>;
  using Sums = BackwardSums<spec, Mods>;
  using Tiles = OwnerWalk<Mods, spec.owns_keys>;

  const Owner<spec> owner;
  const QueryStatistics<spec> queries;
  Sums sums;

  FOVEA_DEVICE_MEMBER Backward(const BackwardParams& b, const OwnedTile& tile)
      : owner(b, tile), queries(owner) {}

  // ---- the walk --------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void add_tile(const WalkedTile& tile, SharedAddress walked, Pass pass) {
    typename Sums::Products scores, dweights;
    Sums::template multiply_rows<typename T::QkRows, T::kQkSteps>(owner, scores, owner.smem,
                                                                  walked);
    if (!tile.is_full) Sums::hide(owner, scores, tile);
    if constexpr (spec.sums_scores) {
      Sums::template multiply_rows<typename T::VRows, T::kVSteps>(
          owner, dweights, owner.smem + T::kOwnedVAt, walked + T::kWalkedVAt);
    }
    const SharedAddress statistics = walked + T::kStatisticsAt;
    if (Mods::has_score || !tile.is_full || pass != Pass::all) {
      Sums::template find_pairs<true>(owner, queries, statistics, tile, is_indicator(pass), scores,
                                      dweights);
    } else {
      Sums::template find_pairs<false>(owner, queries, statistics, tile, false, scores, dweights);
    }
    if (pass != Pass::all) rewrite_walked(owner, walked, pass);
    if constexpr (spec.sums_values)
      Sums::template add_rows<typename T::VRows>(owner, sums.by_value, scores,
                                                 walked + T::kWalkedVAt);
    if constexpr (spec.sums_scores)
      Sums::template add_rows<typename T::QkRows>(owner, sums.by_score, dweights, walked);
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    Tiles tiles(owner.p, owner.owned, spec.tile_owned, spec.tile_walked);
    sums.start();
    const WalkedTile tile = owner.next_tile(tiles);
    if (pass == Pass::all) owner.load_owned();
    owner.for_each_tile(tiles, tile, [this, pass](const WalkedTile& each, SharedAddress walked) {
      add_tile(each, walked, pass);
    });
    ptx::sync_threads();
  }

  // ---- the end ---------------------------------------------------------------------------------

  FOVEA_DEVICE_MEMBER void finish(Pass pass) const {
    const ForwardParams& p = owner.p;
    if constexpr (spec.sums_values) {
      const bool is_scaled = spec.has_dropout && !is_indicator(pass);
      store_sums(owner, owner.b.dv, sums.by_value, is_scaled ? p.dropout_keep_scale : 1.0F,
                 p.head_dim_v, pass);
    }
    if constexpr (spec.sums_scores) {
      if (!is_indicator(pass))
        store_sums(owner, spec.owns_keys ? owner.b.dk : owner.b.dq, sums.by_score, p.softmax_scale,
                   p.head_dim_qk, pass);
    }
  }

  FOVEA_DEVICE_MEMBER void run() {
    constexpr Pass kEnd = spec.sums_values ? Pass::end : Pass::positive;
#pragma unroll 1
    for (Pass pass = Pass::all; pass != kEnd;
         pass = static_cast<Pass>(static_cast<std::int32_t>(pass) + 1)) {
      walk(pass);
      const bool is_done = pass != Pass::all || is_finite(owner, sums);
      if (is_done) finish(pass);
      if (is_done && pass == Pass::all) return;
    }
  }
};

/// Behind another kernel: what it found not finite. A few CTAs for all tiles, since there is hardly ever one to do.
template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE void redo_tiles(const BackwardParams& b) {
  const RedoTiles& redo = spec.owns_keys ? b.redo_keys : b.redo_queries;
  ptx::griddepcontrol_launch_dependents();  // what computes other gradients of such tiles
  ptx::griddepcontrol_wait();
  if (ptx::ld_global(redo.any) == 0) return;
  const auto num_ctas = static_cast<std::int32_t>(ptx::grid_dim().x);
#pragma unroll 1
  for (std::int32_t id = ptx::block_idx().x; id < redo.num_owned; id += num_ctas) {
    const OwnedTile tile = find_tile<spec.is_varlen, spec.owns_keys>(b, id, spec.tile_owned);
    if (tile.is_nothing) continue;
    const std::int64_t place =
        tile_place<spec.is_varlen, spec.owns_keys>(b.forward, tile.sequence, tile.head, tile.begin);
    if (ptx::ld_global(redo.tiles + place) != 0) Backward<spec, Mods>(b, tile).run();
  }
}

template <Sm80BackwardSpec spec, class Mods>
FOVEA_DEVICE void attention_backward(const BackwardParams& b) {
  if constexpr (spec.is_redo) {
    redo_tiles<spec, Mods>(b);
  } else {
    const OwnedTile tile =
        find_tile<spec.is_varlen, spec.owns_keys>(b, ptx::block_idx().x, spec.tile_owned);
    if (tile.is_nothing) return;
    Backward<spec, Mods>(b, tile).run();
  }
}

}  // namespace fovea::cuda::sm80
