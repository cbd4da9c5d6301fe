// Attention forward by mma.sync and cp.async: every tensor-core GPU from sm_80 up, and f16 on Turing, where copies pass
// through registers. On Hopper and Blackwell it is the fallback that runs everything.
//
//   S = Q Kᵀ;  P = exp(mask(program(scale S)) - m);  O = Σ P V / l         Dao 2023 (FlashAttention-2), algorithm 1
//
// One CTA owns tile_q rows (queries of one head, or of several heads of a GQA group) and walks the kv tiles that they
// can see, from left to right. A warp owns 16 or 32 of the rows all along: scores, softmax and sums stay in its
// registers, the accumulator of S is the A operand of P V as it stands, and warps meet only where a stage of shared
// memory changes hands:
//
//   copies   | K0 V0 | K1 V1 |         | K2 V2 |         | K3 V3 |         cp.async, stages - 1 tiles ahead
//   a warp            wait, barrier | S0  softmax  O |  wait, barrier | S1  softmax  O | ...
//
// One barrier for each tile: a stage is written again only after the barrier that follows its last reader. (With one
// stage there are two: walk_in_place. Sequences that shared memory holds as a whole have two in all: walk_at_once.)
// While a warp is in its softmax, the other warps of its scheduler (a second CTA too) keep the tensor cores busy.
//
// Bound: tensor cores, at mma.sync's rate. A warp of 32 rows reads each K and V element from shared memory once: 2 (32
// keys rows) flops for 2 bytes, so that 128 bytes a clock feed 4096 flops a clock, more than mma.sync takes; with 16
// rows (head_dim above 128) it is half of that, and shared memory is the bound. docs/kernels/attention_forward_sm80.md
// counts instructions.
//
// Chapters, in team/ (sm90/decode has its warps compute by them too); the walk and the entry are here:
//
//   team.cuh      which warps share a tile, where its things lie in shared memory, which row is whose
//   load.cuh      Q, K and V on their way in: aligned, strided, paged
//   scores.cuh    S and programs: a tile in a warp's registers; code_scores.cuh, where Q and K have 8 bits
//   compute.cuh   softmax and O of it; coded_sums.cuh, where P and V have 8 bits
//   walk.cuh      which kv tiles the rows see
//   store.cuh     O, lse and row_max, or the partial states of a split, on their way out
//   passes.cuh    NaN and infinity in V, which may reach only rows that see them
//
// Refused: f32 inputs and head dims above 256 (sm80/attention_forward_f32.cuh).
#pragma once

#include "common/copies.cuh"
#include "common/range.cuh"
#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params.h"
#include "shared/forward_spec.h"
#include "team/coded_sums.cuh"
#include "team/compute.cuh"
#include "team/load.cuh"
#include "team/passes.cuh"
#include "team/scores.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm80 {

using namespace team;

/// What a team computes.
template <TeamSpec spec, class Mods>
struct Forward {
  using T = Traits<spec>;
  using Tiles = typename WalkOf<Mods>::Type;
  using Fragments = ScoreFragments<spec>;

  /// Where copies pass through registers: wider sums leave none in which a tile could wait beside products.
  static constexpr bool kTilesWaitInRegisters =
      spec.instructions == Instructions::sm75 && spec.head_dim_v <= 160;

  // Note: with padding behind the team, the same PTX numbers its registers otherwise, and ptxas deals them otherwise.
  [[no_unique_address]] Team<spec> team;
  typename SumsOf<spec, Mods, spec.sums_codes>::Type sums;

  FOVEA_DEVICE_MEMBER Forward(const ForwardParams& p, const Work& work)
      : team{p, work, ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()} {}

  /// S of the tile in this stage.
  FOVEA_DEVICE_MEMBER void multiply_keys(Fragments& s, int stage) {
    sums.scores.multiply_keys(team, s, team.keys_at(stage));
    if constexpr (spec.multiplies_codes) sums.scores.codes.look_at_keys(team, stage);
  }

  /// What follows S of a tile.
  FOVEA_DEVICE_MEMBER void add_tile(Fragments& s, VisitedTile tile, const typename T::VTile& values,
                                    Pass pass) {
    bool is_any_given = false;
    if constexpr (spec.multiplies_codes) is_any_given = sums.scores.codes.finish(team, s, tile);
    if constexpr (spec.sums_codes) sums.look_at_values(team, tile, pass);
    sums.scores.modify(team, s, tile);
    sums.scores.mask(team, s, tile);
    if constexpr (spec.sums_codes) {
      if (is_any_given || !sums.kAreCodes) sums.look_for_nan(s);
    }
    if (pass > Pass::finite) sums.scores.shrink(s);
    sums.softmax(team, s);
    if constexpr (spec.has_dropout) {
      if (pass <= Pass::finite) sums.drop(team, s, tile);
    }
    sums.multiply_values(team, s, values);
  }

  /// Values that have arrived, as this pass wants them.
  FOVEA_DEVICE_MEMBER void rewrite(const typename T::VTile& values, VisitedTile tile,
                                   Pass pass) const {
    if constexpr (spec.sums_codes) {
      rewrite_value_codes(team, values, tile, pass);
    } else {
      rewrite_values(team, values, pass);
    }
  }

  // ---- the walk --------------------------------------------------------------------------------

  /// Full only where all keys exist, too; idx -1: there are no more.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * spec.tile_kv <= team.work.kv_end;
    return tile;
  }

  /// Every tile that the rows see, with stages - 1 tiles of copies under way.
  FOVEA_DEVICE_MEMBER void walk_ahead(Tiles& tiles, Pass pass) {
    constexpr int kAhead = spec.stages - 1;
    const bool has_rows = team.warp_has_rows();
    VisitedTile ahead[kAhead];
    int stage = 0;  // that the next tile is copied to
#pragma unroll 1
    for (int round = -kAhead;; ++round) {
      const bool is_filling = round < 0;
      const VisitedTile tile = ahead[0];
      const int reading = stage == kAhead ? 0 : stage + 1;
      const typename T::VTile values = team.values_at(reading);
      if (!is_filling) {
        if (tile.idx < 0) break;
        // The first tile does not wait for its values yet.
        if (round == 0 && pass == Pass::all) {
          ptx::cp_async_wait_group<2 * kAhead - 1>();
        } else {
          ptx::cp_async_wait_group<2 * kAhead - 2>();
        }
        team.meet();
        if constexpr (T::kKeepsQueries) {
          if (round == 0) sums.scores.keep_queries(team);
        }
        if (pass != Pass::all) rewrite(values, tile, pass);
      }
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = next_tile(tiles);
      load_tile(team, ahead[kAhead - 1], stage);
      stage = reading;
      if (is_filling) continue;
      Fragments s;
      if (has_rows) multiply_keys(s, reading);
      if (round == 0) {
        ptx::cp_async_wait_group<2 * kAhead>();
        team.meet();
      }
      if (has_rows) add_tile(s, tile, values, pass);
    }
  }

  /// The same with one stage, for heads so wide that two would leave one CTA on an SM: keys are copied beside softmax
  /// and P V, values beside Q Kᵀ; two barriers for each tile.
  FOVEA_DEVICE_MEMBER void walk_in_place(Tiles& tiles, Pass pass) {
    const bool has_rows = team.warp_has_rows();
    const typename T::VTile values = team.values_at(0);
    VisitedTile tile = next_tile(tiles);
    load_keys(team, tile, 0);
    bool is_first = true;
#pragma unroll 1
    while (tile.idx >= 0) {
      wait_for_copies<spec.instructions>();
      team.meet();
      load_values(team, tile, 0);
      if constexpr (T::kKeepsQueries) {
        if (is_first) sums.scores.keep_queries(team);
        is_first = false;
      }
      Fragments s;
      if (has_rows) multiply_keys(s, 0);
      wait_for_copies<spec.instructions>();
      team.meet();
      const VisitedTile next = next_tile(tiles);
      load_keys(team, next, 0);
      if (pass != Pass::all) rewrite(values, tile, pass);
      if (has_rows) add_tile(s, tile, values, pass);
      tile = next;
    }
  }

  /// The same where shared memory has a stage for each tile: all are asked for at once, none waits for another's place.
  /// What hides the memory's latency is the SM's other CTAs.
  FOVEA_DEVICE_MEMBER void walk_at_once(Tiles& tiles, Pass pass) {
    const bool has_rows = team.warp_has_rows();
    VisitedGroup group{};
#pragma unroll 1
    for (VisitedTile tile = next_tile(tiles); tile.idx >= 0; tile = next_tile(tiles)) {
      group.visible |= 1U << tile.idx;
      group.full |= static_cast<std::uint32_t>(tile.is_full) << tile.idx;
    }
    load_all_tiles(team, group);
    ptx::cp_async_wait_group<1>();
    team.meet();
    bool has_values = false;
#pragma unroll 1
    while (group.visible != 0) {
      const VisitedTile tile = take_tile<WalkOrder::rising>(group);
      const typename T::VTile values = team.values_at(tile.idx);
      Fragments s;
      if (has_rows) multiply_keys(s, tile.idx);
      if (!has_values) {
        ptx::cp_async_wait_group<0>();
        team.meet();
        has_values = true;
      }
      if (pass != Pass::all) rewrite(values, tile, pass);
      if (has_rows) add_tile(s, tile, values, pass);
    }
  }

  /// As walk_in_place, but a tile is fetched into registers before the products that hide its latency, and put behind
  /// them.
  FOVEA_DEVICE_MEMBER void walk_through_registers(Tiles& tiles, Pass pass) {
    static_assert(spec.stages == 1, "registers are the second stage");
    const bool has_rows = team.warp_has_rows();
    TileInRegisters<spec, typename T::KTile> keys(team.keys_at(0), team.p.k, T::kAt.key_head,
                                                  team.p.head_dim_qk);
    TileInRegisters<spec, typename T::VTile> values(team.values_at(0), team.p.v, T::kAt.value_head,
                                                    team.p.head_dim_v);
    VisitedTile tile = next_tile(tiles);
    keys.fetch(team, tile);
    bool is_first = true;
#pragma unroll 1
    while (tile.idx >= 0) {
      keys.put(team, tile);
      team.meet();
      values.fetch(team, tile);
      if constexpr (T::kKeepsQueries) {
        if (is_first) sums.scores.keep_queries(team);
        is_first = false;
      }
      Fragments s;
      if (has_rows) multiply_keys(s, 0);
      values.put(team, tile);
      team.meet();
      const VisitedTile next = next_tile(tiles);
      keys.fetch(team, next);
      if (pass != Pass::all) rewrite(team.values_at(0), tile, pass);
      if (has_rows) add_tile(s, tile, team.values_at(0), pass);
      tile = next;
    }
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    const TileSpan rows_span = span_of<spec>(team.work);
    Tiles tiles = start_tiles<Tiles>(team, rows_span);
    sums.start();
    load_queries(team);
    if constexpr (kTilesWaitInRegisters) {
      walk_through_registers(tiles, pass);
    } else if constexpr (spec.holds_all_keys) {
      walk_at_once(tiles, pass);
    } else if constexpr (spec.stages == 1) {
      walk_in_place(tiles, pass);
    } else {
      walk_ahead(tiles, pass);
    }
    wait_for_copies<spec.instructions>();
  }

  FOVEA_DEVICE_MEMBER void run() {
    team.keep_work();
    if constexpr (spec.multiplies_codes) sums.scores.codes.keep(team);
    team.meet();
    if constexpr (spec.is_varlen) team.work = team.kept_work();
    run_passes(team, sums, [&](Pass pass) { walk(pass); });
  }
};

template <TeamSpec spec, class Mods>
FOVEA_DEVICE void attention_forward(const ForwardParams& p) {
  const Work work = find_work<spec>(p);
  if (work.is_nothing) return;
  Forward<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
