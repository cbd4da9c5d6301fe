#include "mask/map_coverage.hpp"

#include <algorithm>

#include "core/ceil_div.hpp"

namespace fovea::mask {
namespace {

void add_run(CoverageGrid& grid, std::int64_t row, const TileRun& run) {
  for (std::int64_t tile = run.begin; tile < run.end;) {
    const std::int64_t column = tile / grid.tiles_per_cell;
    const std::int64_t end = std::min<std::int64_t>(run.end, (column + 1) * grid.tiles_per_cell);
    auto& cell = grid.cells[static_cast<std::size_t>(row * grid.num_columns + column)];
    (run.kind == TileKind::full ? cell.num_full : cell.num_partial) += end - tile;
    tile = end;
  }
}

}  // namespace

CoverageGrid coverage_of(const BlockMap& map, std::int64_t max_rows, std::int64_t max_columns) {
  const auto num_q_tiles = static_cast<std::int64_t>(map.rows.size());
  const std::int64_t num_kv_tiles = map.num_kv_tiles();
  CoverageGrid grid;
  grid.tiles_per_cell =
      std::max({std::int64_t{1}, ceil_div(num_q_tiles, std::max<std::int64_t>(1, max_rows)),
                ceil_div(num_kv_tiles, std::max<std::int64_t>(1, max_columns))});
  grid.num_rows = ceil_div(num_q_tiles, grid.tiles_per_cell);
  grid.num_columns = ceil_div(num_kv_tiles, grid.tiles_per_cell);
  grid.cells.resize(static_cast<std::size_t>(grid.num_rows * grid.num_columns));
  for (std::int64_t q_tile = 0; q_tile < num_q_tiles; ++q_tile) {
    const std::int64_t row = q_tile / grid.tiles_per_cell;
    for (std::int64_t column = 0; column < grid.num_columns; ++column) {
      const std::int64_t begin = column * grid.tiles_per_cell;
      grid.cells[static_cast<std::size_t>(row * grid.num_columns + column)].num_tiles +=
          std::min(grid.tiles_per_cell, num_kv_tiles - begin);
    }
    for (const TileRun& run : map.rows[static_cast<std::size_t>(q_tile)]) add_run(grid, row, run);
  }
  return grid;
}

}  // namespace fovea::mask
