// Which kv tiles the rows of a tile see. Chapter 5 of sm80/attention_forward.cuh; read store.cuh next.
#pragma once

#include "common/every_tile.cuh"
#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "shared/forward_spec.h"
#include "team/team.cuh"

namespace fovea::cuda::team {

/// Of the team's keys; `rows` outlives the walk.
template <class Tiles, TeamSpec spec>
FOVEA_DEVICE Tiles start_tiles(const Team<spec>& team, const TileSpan& rows) {
  const std::int32_t begin = team.work.kv_begin / spec.tile_kv;
  std::int32_t end = ceil_div(team.work.kv_end, spec.tile_kv);
  // Lengths in memory may say more than the plan was made for.
  if constexpr (spec.holds_all_keys) end = least(end, spec.stages);
  return Tiles(rows, TileRange{begin, end, spec.tile_kv}, team.p.captures);
}

}  // namespace fovea::cuda::team
