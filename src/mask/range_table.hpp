// Bounds of any run of a tensor along one dimension in O(log extent): what a load yields over a tile.
//
// A pyramid of [min, max]: the lowest level covers 32 elements each, every level above 8 segments of the one below.
// Memory is less than 1 byte per element. Dimensions of stride 0 are stored once.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fovea/tensor.hpp"

#include "expr/interval.hpp"

namespace fovea::mask {

class RangeTable {
 public:
  /// Reads every element once. The tensor must have elements and data, and must outlive the table.
  RangeTable(const TensorView& view, int dim);

  /// Bounds over elements whose index along the table's dimension is in [first, last]; `others` gives the index of
  /// every other dimension. All indices are in range.
  expr::Interval range(const std::array<std::int64_t, kMaxRank>& others, std::int64_t first,
                       std::int64_t last) const;

 private:
  struct Level {
    std::int64_t num_segments = 0;         // of one line of the tensor
    std::vector<expr::Interval> segments;  // [lines][num_segments]
  };
  struct Line {
    std::int64_t idx = 0;     // among the distinct lines along dim_
    std::int64_t offset = 0;  // of its first element
  };

  Line line_at(const std::array<std::int64_t, kMaxRank>& others) const;
  void build_lowest_level();
  void build_level_above(const Level& below);
  void for_each_line(auto&& visit) const;

  TensorView view_;
  int dim_ = 0;
  std::int64_t extent_ = 1;  // along dim_; 1 where its stride is 0
  std::int64_t num_lines_ = 1;
  // of the line index, 0 for dim_ and for strides of 0
  std::array<std::int64_t, kMaxRank> line_strides_{};
  std::vector<Level> levels_;
};

}  // namespace fovea::mask
