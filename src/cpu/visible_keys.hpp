// What a panel of queries sees of the key tiles, tile by tile, from its row of the block map.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/kernels/panel.hpp"
#include "mask/block_map.hpp"

namespace fovea::cpu {

inline constexpr std::int64_t kMaxSubTiles = 8;  // in a tile; candidates.cpp makes tiles of 4

/// Ranges are relative to the tile.
struct VisiblePart {
  KeyRange range;  // count 0: nothing
  // Parts that the mask cuts, or hides between two visible ones: only these are masked.
  std::array<KeyRange, kMaxSubTiles> partial{};
  int num_partial = 0;
};

struct VisibleKeys {
  std::vector<mask::TileRun> runs{};  // in tiles of `unit`
  std::int64_t unit = kSubTileKeys;
  std::size_t run = 0;

  /// Keys from the first to the last that some row sees.
  KeyRange all(std::int64_t seqlen_kv) const {
    if (runs.empty()) return {};
    const std::int64_t begin = runs.front().begin * unit;
    return {begin, std::min(seqlen_kv, runs.back().end * unit) - begin};
  }

  /// Asked for in rising order of tiles [begin, end).
  VisiblePart next(std::int64_t begin, std::int64_t end) {
    VisiblePart seen;
    std::int64_t low = end;
    std::int64_t high = begin;
    while (run < runs.size() && runs[run].end * unit <= begin) ++run;
    for (std::size_t i = run; i < runs.size() && runs[i].begin * unit < end; ++i) {
      const std::int64_t from = std::max(begin, runs[i].begin * unit);
      const std::int64_t to = std::min(end, runs[i].end * unit);
      if (low < high && high < from) add_partial(seen, high - begin, from - begin);
      if (runs[i].kind == mask::TileKind::partial) add_partial(seen, from - begin, to - begin);
      low = std::min(low, from);
      high = to;
    }
    if (low < high) seen.range = {low - begin, high - low};
    return seen;
  }

 private:
  static void add_partial(VisiblePart& seen, std::int64_t from, std::int64_t to) {
    if (seen.num_partial > 0) {
      KeyRange& last = seen.partial[static_cast<std::size_t>(seen.num_partial - 1)];
      if (last.begin + last.count == from) {
        last.count = to - last.begin;
        return;
      }
    }
    seen.partial[static_cast<std::size_t>(seen.num_partial++)] = {from, to - from};
  }
};

}  // namespace fovea::cpu
