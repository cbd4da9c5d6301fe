// What a mask leaves of the score matrix, by tiles and by elements: which tiles are empty, partial or full, as kernels
// will see them, and the mask itself. mask.hpp has the masks.
//
//   BlockMap map = block_map({.mask = causal(), .seqlen_q = 1024, .seqlen_kv = 1024});
//   map.row(3);     // {{0, 3, full}, {3, 4, partial}}: 3 tiles of keys are full, the fourth holds the diagonal
//   map.print();    // a picture in text
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"
#include "fovea/tensor.hpp"

namespace fovea {

/// What is proven of a tile: no key is visible, or nothing is proven, or every key is. A partial tile may hold neither
/// kind alone; empty and full are never wrong.
enum class TileKind : std::uint8_t { empty, partial, full };

/// A half-open run of tiles of keys of one kind.
struct TileRun {
  std::int32_t begin = 0, end = 0;
  TileKind kind = TileKind::full;
  bool operator==(const TileRun&) const = default;
};

/// Whose scores, and how they are cut. See block_map for what is refused.
struct BlockMapSpec {
  MaskMod mask{};
  std::int64_t batch = 1;  // sequences
  std::int64_t num_heads_q = 1, num_heads_kv = 1;
  std::int64_t seqlen_q = 0, seqlen_kv = 0;  // of every sequence
  /// [batch + 1] i32 or i64 on the cpu, both or neither: packed sequences, which say batch and lengths themselves.
  TensorView cu_seqlens_q{}, cu_seqlens_kv{};

  std::int64_t tile_q = 64, tile_kv = 64;  // queries and keys of a tile
  /// One sequence, one query head alone: the map then has one, of index 0. Masks see the true index.
  std::optional<std::int64_t> sequence{}, q_head{};
};

/// 8-bit RGB, row-major.
struct MaskPicture {
  int width = 0, height = 0;
  std::vector<std::uint8_t> rgb{};  // [height, width, 3]
};

/// Every tile of every (sequence, query head) of a spec, as runs of tiles that are not empty: O(runs) memory.
/// Immutable, cheap to copy, thread safe. An index out of range throws InvalidArgument.
class FOVEA_EXPORT BlockMap {
 public:
  std::int64_t num_sequences() const;
  std::int64_t num_heads() const;  // query heads
  std::int64_t seqlen_q(std::int64_t sequence = 0) const;
  std::int64_t seqlen_kv(std::int64_t sequence = 0) const;
  std::int64_t num_q_tiles(std::int64_t sequence = 0) const;
  std::int64_t num_kv_tiles(std::int64_t sequence = 0) const;

  /// Runs of one row of tiles, sorted, partial or full; what no run covers is empty. Live as long as a copy of the map.
  std::span<const TileRun> row(std::int64_t q_tile, std::int64_t sequence = 0,
                               std::int64_t q_head = 0) const;
  TileKind at(std::int64_t q_tile, std::int64_t kv_tile, std::int64_t sequence = 0,
              std::int64_t q_head = 0) const;

  /// Of all sequences and heads, or of one.
  TileCount count() const;
  TileCount count(std::int64_t sequence, std::int64_t q_head) const;

  /// One character for each tile (or several tiles where more than fit), queries down, keys across, and a legend.
  std::string print(std::int64_t sequence = 0, std::int64_t q_head = 0, int max_width = 96,
                    int max_height = 48) const;
  /// The same in pixels: empty white, partial orange, full blue, blends where a pixel holds several tiles.
  MaskPicture draw(std::int64_t sequence = 0, std::int64_t q_head = 0, int max_size = 1024) const;

  struct Impl;
  explicit BlockMap(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Reads what the mask captures, on the cpu; a captured tensor without data may hold anything. What a mask does not
/// read is mapped once and shared: a causal map of a thousand heads costs that of one.
/// Time     a few operations a row of tiles for masks that are bands (causal, window, chunked ...), O(runs · log tiles)
///          evaluations of the mask on intervals for others.
/// Throws   InvalidArgument: negative lengths, tiles below 1, heads that do not divide, cu_seqlens as in
///          attention_forward, an index of sequence or q_head out of range, captured tensors that live on a GPU, more
///          than 2^26 rows of tiles to map.
[[nodiscard]] FOVEA_EXPORT BlockMap block_map(const BlockMapSpec& spec);

/// The mask of a spec, element by element, from query q_begin and key kv_begin on: visible[b, h, i, j] says whether
/// query q_begin + i of sequence b sees key kv_begin + j in head h, as attention does. Positions behind a sequence's
/// end are hidden. Tile sizes are not read.
///
/// visible  [sequences, heads, rows, columns]  bool or u8, written; any strides
///
/// A tile of a map: a view of [1, 1, tile_q, tile_kv] with q_begin = q_tile · tile_q. Captured tensors need data here.
/// Throws   as block_map, and for a tensor of another shape or dtype, before anything is written.
FOVEA_EXPORT void materialize_mask(const BlockMapSpec& spec, const TensorView& visible,
                                   std::int64_t q_begin = 0, std::int64_t kv_begin = 0);

}  // namespace fovea
