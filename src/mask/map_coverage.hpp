// Shares of full, partial and empty tiles under each cell of a picture. Read print_block_map.cpp and draw_block_map.cpp
// next.
#pragma once

#include <cstdint>
#include <vector>

#include "mask/block_map.hpp"

namespace fovea::mask {

/// A picture's grid: cells of `tiles_per_cell` x `tiles_per_cell` tiles; those at the right and bottom may hold fewer.
struct CoverageGrid {
  struct Cell {
    std::int64_t num_tiles = 0, num_partial = 0, num_full = 0;
    std::int64_t num_empty() const { return num_tiles - num_partial - num_full; }
  };
  std::int64_t tiles_per_cell = 1;
  std::int64_t num_rows = 0, num_columns = 0;
  std::vector<Cell> cells;  // [num_rows][num_columns]

  const Cell& at(std::int64_t row, std::int64_t column) const {
    return cells[static_cast<std::size_t>(row * num_columns + column)];
  }
};

/// The finest grid of at most max_rows x max_columns cells (each at least 1).
CoverageGrid coverage_of(const BlockMap& map, std::int64_t max_rows, std::int64_t max_columns);

}  // namespace fovea::mask
