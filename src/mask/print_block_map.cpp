// A block map as text: a frame, one character per cell, a legend with percentages.
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "mask/block_map.hpp"
#include "mask/map_coverage.hpp"

namespace fovea::mask {
namespace {

constexpr std::string_view kFull = "█";
constexpr std::string_view kPartial = "░";
constexpr std::string_view kEmpty = " ";

std::string_view character_of(const CoverageGrid::Cell& cell) {
  if (cell.num_empty() == cell.num_tiles) return kEmpty;
  return cell.num_full == cell.num_tiles ? kFull : kPartial;
}

std::string repeated(std::string_view text, std::int64_t count) {
  std::string result;
  for (std::int64_t i = 0; i < count; ++i) result += text;
  return result;
}

std::string picture(const CoverageGrid& grid) {
  const std::string edge = repeated("─", grid.num_columns);
  std::string text = "┌" + edge + "┐\n";
  for (std::int64_t row = 0; row < grid.num_rows; ++row) {
    text += "│";
    for (std::int64_t column = 0; column < grid.num_columns; ++column) {
      text += character_of(grid.at(row, column));
    }
    text += "│\n";
  }
  return text + "└" + edge + "┘\n";
}

std::string legend(const BlockMap& map, const CoverageGrid& grid) {
  const TileCount count = map.count();
  const auto percent = [&](std::int64_t num_tiles) {
    return count.total() == 0
               ? 0.0
               : 100.0 * static_cast<double>(num_tiles) / static_cast<double>(count.total());
  };
  std::string text = fmt::format(
      "{} full {:.1f} %   {} partial {:.1f} %   blank: empty {:.1f} %\n"
      "{} x {} tiles of {} queries (down) x {} keys (across)",
      kFull, percent(count.full), kPartial, percent(count.partial), percent(count.empty),
      map.rows.size(), map.num_kv_tiles(), map.tile_q, map.tile_kv);
  if (grid.tiles_per_cell > 1) {
    text += fmt::format("; a character is {0} x {0} tiles, {1} where they differ",
                        grid.tiles_per_cell, kPartial);
  }
  return text + "\n";
}

}  // namespace

std::string print_block_map(const BlockMap& map, int max_width, int max_height) {
  const CoverageGrid grid = coverage_of(map, max_height, max_width);
  return picture(grid) + legend(map, grid);
}

}  // namespace fovea::mask
