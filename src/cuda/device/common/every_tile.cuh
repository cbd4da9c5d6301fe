// A walk over kv tiles of which all are full, and which walk a mask asks for: this one or tile_walk.cuh's.
#pragma once

#include "common/sequence.cuh"
#include "common/tile_walk.cuh"
#include "shared/captures.h"

namespace fovea::cuda {

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

}  // namespace fovea::cuda
