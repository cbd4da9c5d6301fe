// Attention over a cache of codes by mma.sync: every tensor-core GPU from sm_80 up, decoding and longer chunks alike.
//
//   k = scale_k code_k,  v = scale_v code_v            a scale for each row and head, or given (kv_cache.hpp)
//
// What sm80/attention_forward computes, from half the bytes of memory. Codes pass through registers: each thread asks
// for its part of a tile, 16 codes at a time and the scale of their row, before the products of the tile ahead of it,
// and afterwards writes it to shared memory as numbers of the queries' 16 bits. From there on a tile is as any other,
// NaN and infinity in V too.
//
//   memory   | ask 0 |      | ask 1              |      | ask 2              |
//   a warp           | write 0 | barrier | S0 softmax O | write 1 | barrier | S1 softmax O |
//
// One barrier for each tile: with two stages one is written again only after the barrier that follows its last reader.
//
// Rounding: code times scale to f32, then to bf16 or f16, as appending to a cache of 16 bits would have rounded.
//
// Bound: memory; then the conversion, some four instructions a code, which all warps share.
//
// Refused: f32 queries, head dims above 256, caches of which one half is no codes.
#pragma once

#include "common/row_view.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "shared/forward_params_coded.h"
#include "shared/forward_spec.h"
#include "team/codes.cuh"
#include "team/compute.cuh"
#include "team/load.cuh"
#include "team/passes.cuh"
#include "team/scores.cuh"
#include "team/store.cuh"
#include "team/team.cuh"
#include "team/walk.cuh"

namespace fovea::cuda::sm80 {

using namespace team;

/// What a CTA computes.
template <CodedSpec coded, class Mods>
struct CodedForward {
  static constexpr TeamSpec kSpec = coded;
  using T = Traits<kSpec>;
  using Tiles = typename WalkOf<Mods>::Type;
  using Keys = team::CodedRows<kSpec, coded.k_codes, typename T::KTile>;
  using Values = team::CodedRows<kSpec, coded.v_codes, typename T::VTile>;
  static_assert(coded.stages == 2, "a tile is written while warps may read the one before it");

  const CodedParams& p;
  Team<kSpec> team;
  Sums<kSpec, Mods> sums;
  Keys keys;
  Values values;

  FOVEA_DEVICE_MEMBER CodedForward(const CodedParams& params, const Work& work)
      : p(params),
        team{params.common, work, ptx::dynamic_shared(), ptx::warp_idx(), ptx::lane_idx()} {}

  /// Full only where all keys exist, too; idx -1: there are no more.
  FOVEA_DEVICE_MEMBER VisitedTile next_tile(Tiles& tiles) const {
    VisitedTile tile;
    if (!tiles.next(tile)) return {-1, false};
    tile.is_full = tile.is_full && (tile.idx + 1) * kSpec.tile_kv <= team.work.kv_end;
    return tile;
  }

  FOVEA_DEVICE_MEMBER void load(VisitedTile tile) {
    if (tile.idx < 0) return;
    keys.load(team, p, p.common.k, p.k_scale, tile.idx, p.common.head_dim_qk);
    values.load(team, p, p.common.v, p.v_scale, tile.idx, p.common.head_dim_v);
  }

  FOVEA_DEVICE_MEMBER void add_tile(VisitedTile tile, int stage, Pass pass) {
    ScoreFragments<kSpec> s;
    sums.scores.multiply_keys(team, s, team.keys_at(stage));
    sums.scores.modify(team, s, tile);
    sums.scores.mask(team, s, tile);
    if (pass > Pass::finite) sums.scores.shrink(s);
    sums.softmax(team, s);
    sums.multiply_values(team, s, team.values_at(stage));
  }

  FOVEA_DEVICE_MEMBER void walk(Pass pass) {
    const TileSpan rows_span = span_of<kSpec>(team.work);
    Tiles tiles = start_tiles<Tiles>(team, rows_span);
    sums.start();
    load_queries(team);
    ptx::cp_async_commit_group();
    const bool has_rows = team.warp_has_rows();
    VisitedTile tile = next_tile(tiles);
    load(tile);
    bool is_first = true;
#pragma unroll 1
    for (int stage = 0; tile.idx >= 0; stage ^= 1) {
      keys.store(team, team.keys_at(stage));
      values.store(team, team.values_at(stage));
      if (is_first) ptx::cp_async_wait_group<0>();
      team.meet();
      if constexpr (T::kKeepsQueries) {
        if (is_first) sums.scores.keep_queries(team);
      }
      is_first = false;
      if (pass != Pass::all) rewrite_values(team, team.values_at(stage), pass);
      const VisitedTile next = next_tile(tiles);
      load(next);
      if (has_rows) add_tile(tile, stage, pass);
      tile = next;
    }
    ptx::cp_async_wait_group<0>();
  }

  FOVEA_DEVICE_MEMBER void run() {
    team.keep_work();
    team.meet();
    if constexpr (kSpec.is_varlen) team.work = team.kept_work();
    run_passes(team, sums, [&](Pass pass) { walk(pass); });
  }
};

template <CodedSpec spec, class Mods>
FOVEA_DEVICE void attention_coded(const CodedParams& p) {
  const Work work = find_work<spec>(p.common);
  if (work.is_nothing) return;
  CodedForward<spec, Mods>(p, work).run();
}

}  // namespace fovea::cuda::sm80
