// Who computes what: the block map with a rank in the place of a kind, as text and in colours.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "parallel/shard_plan.hpp"

namespace fovea {
namespace {

constexpr int kNobody = -1;
constexpr std::string_view kDigits =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// The rank of each cell of tokens x tokens.
struct RankGrid {
  std::int64_t num_rows = 0, num_columns = 0;
  std::vector<int> ranks;  // [num_rows][num_columns]
  int at(std::int64_t row, std::int64_t column) const {
    return ranks[static_cast<std::size_t>(row * num_columns + column)];
  }
};

/// Scores of one row of cells that each group computes.
class RowOfCells {
 public:
  RowOfCells(const ShardPlan::Impl& plan, std::int64_t num_columns)
      : seqlen_(plan.shape.seqlen),
        tile_kv_(plan.row_tiles.tile_kv),
        num_columns_(num_columns),
        num_groups_(plan.num_groups()),
        scores_(static_cast<std::size_t>(num_columns * num_groups_)) {}

  void clear() { std::ranges::fill(scores_, 0); }

  void add(int group, std::int64_t num_rows, std::span<const TileRun> runs) {
    for (const TileRun& run : runs) {
      const std::int64_t begin = run.begin * tile_kv_;
      const std::int64_t end = std::min(run.end * tile_kv_, seqlen_);
      for (std::int64_t c = begin * num_columns_ / seqlen_; c < num_columns_; ++c) {
        const std::int64_t overlap = std::min(end, edge(c + 1)) - std::max(begin, edge(c));
        if (edge(c) >= end) break;
        scores_[static_cast<std::size_t>(c * num_groups_ + group)] +=
            num_rows * std::max<std::int64_t>(overlap, 0);
      }
    }
  }

  /// The group that computes most of a cell.
  int busiest(std::int64_t column) const {
    const auto begin = scores_.begin() + column * num_groups_;
    const auto most = std::max_element(begin, begin + num_groups_);
    return *most == 0 ? kNobody : static_cast<int>(most - begin);
  }

 private:
  std::int64_t edge(std::int64_t column) const { return column * seqlen_ / num_columns_; }

  const std::int64_t seqlen_, tile_kv_, num_columns_;
  const int num_groups_;
  std::vector<std::int64_t> scores_;  // [num_columns][num_groups]
};

/// The finest grid of at most so many cells, no finer than tiles.
RankGrid grid_of(const ShardPlan::Impl& plan, std::int64_t sequence, std::int64_t q_head,
                 std::int64_t max_rows, std::int64_t max_columns) {
  const parallel::RowTiles& rows = plan.row_tiles;
  const std::int64_t seqlen = plan.shape.seqlen;
  const auto num_row_tiles = static_cast<std::int64_t>(rows.tiles.size());
  RankGrid grid;
  if (seqlen == 0) return grid;
  const std::int64_t num_kv_tiles = (seqlen + rows.tile_kv - 1) / rows.tile_kv;
  grid.num_rows = std::clamp<std::int64_t>(max_rows, 1, num_row_tiles);
  grid.num_columns = std::clamp<std::int64_t>(max_columns, 1, num_kv_tiles);
  RowOfCells cells(plan, grid.num_columns);
  const std::int64_t part = q_head / (plan.shape.num_heads_q / plan.head_ranks);
  std::size_t tile = 0;
  for (std::int64_t row = 0; row < grid.num_rows; ++row) {
    cells.clear();
    // At least one tile: rests may be shorter than a cell.
    const std::int64_t last = (row + 1) * num_row_tiles / grid.num_rows;
    for (; static_cast<std::int64_t>(tile) < last; ++tile) {
      cells.add(plan.group_of_tile[tile], rows.tiles[tile].size(),
                rows.runs(tile, rows.mapped_sequence(sequence), rows.mapped_head(q_head)));
    }
    for (std::int64_t column = 0; column < grid.num_columns; ++column) {
      const int group = cells.busiest(column);
      grid.ranks.push_back(group == kNobody ? kNobody
                                            : group * plan.head_ranks + static_cast<int>(part));
    }
  }
  return grid;
}

/// Hues a golden angle apart, so that neighbouring ranks differ.
std::array<std::uint8_t, 3> colour_of(int rank) {
  if (rank == kNobody) return {255, 255, 255};
  constexpr double kGoldenTurn = 0.61803398874989485;
  constexpr double kLight = 0.62, kChroma = 0.33;
  const double turn = std::fmod(kGoldenTurn * rank, 1.0);
  std::array<std::uint8_t, 3> colour{};
  for (std::size_t channel = 0; channel < colour.size(); ++channel) {
    constexpr double kTurn = 6.283185307179586;
    const double wave = std::cos(kTurn * (turn - static_cast<double>(channel) / 3));
    colour[channel] = static_cast<std::uint8_t>(std::lround(255 * (kLight + kChroma * wave)));
  }
  return colour;
}

std::string repeated(std::string_view text, std::int64_t count) {
  std::string result;
  for (std::int64_t i = 0; i < count; ++i) result += text;
  return result;
}

}  // namespace

std::string ShardPlan::print_ranks(std::int64_t sequence, std::int64_t q_head, int max_width,
                                   int max_height) const {
  parallel::check_sequence_and_head(impl_->shape, sequence, q_head);
  const RankGrid grid = grid_of(*impl_, sequence, q_head, max_height, max_width);
  const std::string edge = repeated("─", grid.num_columns);
  std::string text = "┌" + edge + "┐\n";
  for (std::int64_t row = 0; row < grid.num_rows; ++row) {
    text += "│";
    for (std::int64_t column = 0; column < grid.num_columns; ++column) {
      const int rank = grid.at(row, column);
      text += rank == kNobody ? ' ' : kDigits[static_cast<std::size_t>(rank) % kDigits.size()];
    }
    text += "│\n";
  }
  return text + "└" + edge + "┘\n";
}

MaskPicture ShardPlan::draw_ranks(std::int64_t sequence, std::int64_t q_head, int max_size) const {
  parallel::check_sequence_and_head(impl_->shape, sequence, q_head);
  constexpr std::int64_t kMostPixelsPerCell = 16;
  const std::int64_t limit = std::max(1, max_size);
  const RankGrid grid = grid_of(*impl_, sequence, q_head, limit, limit);
  const std::int64_t longest = std::max({std::int64_t{1}, grid.num_rows, grid.num_columns});
  const std::int64_t scale = std::clamp<std::int64_t>(limit / longest, 1, kMostPixelsPerCell);
  MaskPicture picture{.width = static_cast<int>(grid.num_columns * scale),
                      .height = static_cast<int>(grid.num_rows * scale),
                      .rgb = {}};
  for (std::int64_t y = 0; y < picture.height; ++y) {
    for (std::int64_t x = 0; x < picture.width; ++x) {
      const auto colour = colour_of(grid.at(y / scale, x / scale));
      picture.rgb.insert(picture.rgb.end(), colour.begin(), colour.end());
    }
  }
  return picture;
}

}  // namespace fovea
