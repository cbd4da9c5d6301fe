// Which (q, kv) tiles of a mask are empty, partial or full, proven by interval analysis of the mask program.
//
// empty and full are claimed only when proven. One row of tiles at a time, so memory is O(tiles of a row): kernels ask
// for the row that they are about to walk, statistics and pictures ask for all.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/block_map.hpp"
#include "fovea/expr.hpp"

#include "expr/interval.hpp"
#include "mask/bands.hpp"

namespace fovea::mask {

using fovea::TileKind;
using fovea::TileRun;  // a row is a sorted list of its non-empty runs

/// The sequence and rows that a question is about. Ranges are half-open.
struct TileRow {
  std::int64_t batch = 0;
  std::int64_t q_head_begin = 0,
               q_head_end = 1;  // rows of several heads of one GQA group may share a tile
  std::int64_t kv_head = 0;
  std::int64_t q_begin = 0, q_end = 0;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;
  // Tiles that are looked at where the mask is no union of bands: the caller knows that these rows see no other.
  std::int64_t tiles_begin = 0, tiles_end = std::numeric_limits<std::int64_t>::max();
};

/// A mask program prepared for block questions.
///
/// Masks that are unions of bands (bands.hpp) cost a handful of integer operations per row. The others are bounded over
/// (q rows x kv range) boxes, halving the kv range where a box is neither empty nor full: O(runs * log tiles)
/// evaluations per row. A tile that stays undecided is split further, within a small budget, so that most masks come
/// out exact.
class BlockMapper {
 public:
  /// The tensors that the mask captures must stay alive and unchanged: where positions index them, they are read here,
  /// once, into range tables (range_table.hpp). A tensor without data is taken to hold anything. tile_kv >= 1.
  BlockMapper(const MaskMod& mask, std::int64_t tile_kv);
  /// Of the formula alone: for over(), and for questions where the mask captures nothing. Reads no tensor.
  static BlockMapper of_formula(const MaskMod& mask, std::int64_t tile_kv);
  /// The same formula over the tensors and numbers of `mask`, at the cost of their range tables.
  BlockMapper over(const MaskMod& mask) const;
  ~BlockMapper();
  BlockMapper(BlockMapper&&) noexcept;
  BlockMapper& operator=(BlockMapper&&) noexcept;

  /// True when no tensor is read position by position: lengths, scalars and per-sequence values (prefix lengths)
  /// decide, so nothing is kept in memory.
  bool is_closed_form() const;

  /// The non-empty runs of one row, sorted; none for a row that sees nothing. `runs` is cleared; its capacity is
  /// reused. Runs lie in [0, ceil(seqlen_kv / tile_kv)); the last tile may be cut by seqlen_kv and is full when all its
  /// existing keys are visible. Thread safe; allocates nothing but growth of `runs` (and scratch of a thread's first
  /// call).
  ///
  /// Where partial tiles are cut by the edges of one band, returns these: what each q_idx sees, without running the
  /// mask.
  std::optional<BandEdges> row(const TileRow& row, std::vector<TileRun>& runs) const;

  /// Tiles outside of which these rows see nothing, without a look at single tiles: what many neighbouring rows are to
  /// be asked within. All of them where the mask is a union of bands, whose rows cost nothing.
  Span hull(const TileRow& row) const;

 private:
  struct Impl;
  explicit BlockMapper(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Every tile of every row of one (batch, q_head): statistics and pictures.
struct BlockMap {
  std::int64_t tile_q = 0, tile_kv = 0, seqlen_q = 0, seqlen_kv = 0;
  std::vector<std::vector<TileRun>> rows;  // one per q tile

  std::int64_t num_kv_tiles() const { return (seqlen_kv + tile_kv - 1) / tile_kv; }
  TileCount count() const;
  TileKind at(std::int64_t q_tile, std::int64_t kv_tile) const;
};

BlockMap build_block_map(const MaskMod& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                         std::int64_t tile_q, std::int64_t tile_kv, std::int64_t batch = 0,
                         std::int64_t q_head = 0, std::int64_t kv_head = 0);

/// A picture in text: one character per tile (several tiles when larger than max_width x max_height), with a legend.
std::string print_block_map(const BlockMap& map, int max_width = 96, int max_height = 48);

/// The same as pixels: empty white, partial orange, full blue (or blends when scaled down).
MaskPicture draw_block_map(const BlockMap& map, int max_size = 1024);

}  // namespace fovea::mask
