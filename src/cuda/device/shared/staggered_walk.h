// Where walks over queries begin that take turns at adding to dq, where every row sees every key.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

/// Of a head whose tiles of keys see every tile of queries, by turns: walks begin at different tiles, fall, go on from
/// the last tile behind the first, and end where they began. So a CTA comes to a tile of queries a while behind the CTA
/// of the keys before its own: whoever waits has waited for somebody who is long done.
///
/// Sums of a tile are two: of CTAs that come there before they have gone round, and of those behind. In each the order
/// is that of keys, so that no CTA waits for one that is launched later; the first stores, the others add.
struct StaggeredWalk {
  std::int32_t key_tile, num_query_tiles;
  std::int32_t begin_before;  // of the walk of the keys before its own; -1: there are none
  std::int32_t begin;         // of its own

  static constexpr StaggeredWalk of(std::int32_t key_tile, std::int32_t num_key_tiles,
                                    std::int32_t num_query_tiles) {
    const auto begin = [=](std::int32_t tile) { return tile * num_query_tiles / num_key_tiles; };
    return {key_tile, num_query_tiles, key_tile == 0 ? -1 : begin(key_tile - 1), begin(key_tile)};
  }

  /// Tiles that it has behind it when it comes to `tile`, and that the walk of the keys before has.
  constexpr std::int32_t position(std::int32_t tile) const { return from(begin, tile); }
  constexpr std::int32_t position_before(std::int32_t tile) const {
    return from(begin_before, tile);
  }
  /// Does it come to the tile after it has gone round?
  constexpr bool is_round(std::int32_t tile) const { return tile > begin; }
  /// Is this the first part of its sum?
  constexpr bool is_first(std::int32_t tile) const {
    return is_round(tile) ? key_tile == 0 : tile > begin_before;
  }

 private:
  constexpr std::int32_t from(std::int32_t first, std::int32_t tile) const {
    return first - tile + (tile > first ? num_query_tiles : 0);
  }
};

/// Has a tile a sum of walks that have gone round, and one of walks that have not?
constexpr bool has_round_sum(std::int32_t tile) { return tile > 0; }
constexpr bool has_first_sum(std::int32_t tile, std::int32_t num_key_tiles,
                             std::int32_t num_query_tiles) {
  return tile <= StaggeredWalk::of(num_key_tiles - 1, num_key_tiles, num_query_tiles).begin;
}
/// So many pairs of tiles can be counted.
inline constexpr std::int64_t kMostStaggeredPairs = std::int64_t{1} << 31;

}  // namespace fovea::cuda
