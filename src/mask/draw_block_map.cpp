// A block map as pixels: a square of pixels per tile, or a blend of the tiles under a pixel when there are more of
// them.
#include <algorithm>
#include <array>
#include <cstddef>

#include "mask/block_map.hpp"
#include "mask/map_coverage.hpp"

namespace fovea::mask {
namespace {

using Rgb = std::array<std::int64_t, 3>;

constexpr Rgb kEmptyColour{255, 255, 255};
constexpr Rgb kPartialColour{244, 157, 65};
constexpr Rgb kFullColour{43, 94, 167};

// Larger squares than this make small maps no clearer.
constexpr std::int64_t kMaxPixelsPerTile = 16;

Rgb colour_of(const CoverageGrid::Cell& cell) {
  Rgb colour{};
  for (std::size_t c = 0; c < colour.size(); ++c) {
    const std::int64_t sum = cell.num_empty() * kEmptyColour[c] +
                             cell.num_partial * kPartialColour[c] + cell.num_full * kFullColour[c];
    colour[c] = (sum + cell.num_tiles / 2) / cell.num_tiles;
  }
  return colour;
}

}  // namespace

MaskPicture draw_block_map(const BlockMap& map, int max_size) {
  const std::int64_t limit = std::max(1, max_size);
  const CoverageGrid grid = coverage_of(map, limit, limit);
  const std::int64_t longest = std::max({std::int64_t{1}, grid.num_rows, grid.num_columns});
  const std::int64_t scale =
      grid.tiles_per_cell > 1 ? 1 : std::clamp<std::int64_t>(limit / longest, 1, kMaxPixelsPerTile);

  MaskPicture image{.width = static_cast<int>(grid.num_columns * scale),
                    .height = static_cast<int>(grid.num_rows * scale),
                    .rgb = {}};
  image.rgb.reserve(std::size_t{3} * static_cast<std::size_t>(image.width) *
                    static_cast<std::size_t>(image.height));
  for (std::int64_t y = 0; y < image.height; ++y) {
    for (std::int64_t x = 0; x < image.width; ++x) {
      for (const std::int64_t channel : colour_of(grid.at(y / scale, x / scale))) {
        image.rgb.push_back(static_cast<std::uint8_t>(channel));
      }
    }
  }
  return image;
}

}  // namespace fovea::mask
