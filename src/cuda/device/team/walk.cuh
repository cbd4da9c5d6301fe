// Which kv tiles the rows of a tile see. Chapter 5 of sm80/attention_forward.cuh; read store.cuh next.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "shared/forward_spec.h"
#include "team/team.cuh"

namespace fovea::cuda::team {

/// The walk of a problem without a mask: a counter, which leaves its registers to the sums.
class EveryTile {
 public:
  FOVEA_DEVICE_MEMBER EveryTile(const TileSpan&, const TileRange& tiles, const Captures&)
      : next_(tiles.begin), end_(tiles.end) {}
  FOVEA_DEVICE_MEMBER bool next(VisitedTile& tile) {
    tile = {next_, true};
    return next_++ < end_;
  }
  /// The next `count`, fewer than 32, or what is left of them.
  FOVEA_DEVICE_MEMBER bool next_few(VisitedGroup& few, std::int32_t count) {
    if (next_ >= end_) return false;
    const std::uint32_t tiles = (1U << least(count, end_ - next_)) - 1;
    few = {next_, tiles, tiles};
    next_ += count;
    return true;
  }

 private:
  std::int32_t next_, end_;
};

template <class Mods, bool has_mask = Mods::has_mask>
struct WalkOf {
  using Type = TileWalk<Mods>;
};
template <class Mods>
struct WalkOf<Mods, false> {
  using Type = EveryTile;
};

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
