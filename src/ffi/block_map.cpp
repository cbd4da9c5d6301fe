// The functions of fovea.h that say what a mask leaves: tiles, runs, elements, pictures; and lists of tiles as a mask's
// table.
#include "fovea/block_map.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "fovea/fovea.h"
#include "fovea/mask.hpp"

#include "core/check.hpp"
#include "ffi/arguments.hpp"
#include "ffi/error.hpp"
#include "ffi/explanation.hpp"
#include "ffi/sized_struct.hpp"
#include "ffi/tensor.hpp"

namespace {

using fovea::BlockMap;
using fovea::BlockMapSpec;
using fovea::TileRun;
using fovea::ffi::guarded;

static_assert(static_cast<int>(fovea::TileKind::empty) == FOVEA_TILE_EMPTY);
static_assert(static_cast<int>(fovea::TileKind::partial) == FOVEA_TILE_PARTIAL);
static_assert(static_cast<int>(fovea::TileKind::full) == FOVEA_TILE_FULL);

constexpr std::int64_t kDefaultTile = 64;  // as in BlockMapSpec

bool to_bool(std::int32_t value, const std::string& label) {
  if (value < 0 || value > 1)
    fovea::invalid(label, "is " + std::to_string(value) + "; expected 0 to 1");
  return value == 1;
}

BlockMapSpec to_spec(const fovea_block_map_args* source, const std::string& where) {
  const auto c = fovea::ffi::read_struct(source, offsetof(fovea_block_map_args, tile_q), where);
  const fovea::ffi::MaskCall call = fovea::ffi::to_mask_call(c.forward, where + ": forward");
  BlockMapSpec spec{.mask = call.mask,
                    .cu_seqlens_q = call.cu_seqlens_q,
                    .cu_seqlens_kv = call.cu_seqlens_kv,
                    .tile_q = c.tile_q == 0 ? kDefaultTile : c.tile_q,
                    .tile_kv = c.tile_kv == 0 ? kDefaultTile : c.tile_kv};
  const int heads = call.q.rank() - 2;
  spec.num_heads_q = call.q.size(heads);
  spec.num_heads_kv = call.k.size(heads);
  if (call.q.rank() == 4) {
    spec.batch = call.q.size(0);
    spec.seqlen_q = call.q.size(1);
    spec.seqlen_kv = call.k.size(1);
  }
  if (to_bool(c.has_sequence, where + ": has_sequence")) spec.sequence = c.sequence;
  if (to_bool(c.has_q_head, where + ": has_q_head")) spec.q_head = c.q_head;
  return spec;
}

template <typename T>
void require(T* pointer, const std::string& where, const char* name) {
  if (pointer == nullptr)
    fovea::invalid(where, std::string(name) + " is NULL; expected an address");
}

void require_size(std::size_t got, std::size_t expected, const std::string& where,
                  const char* name) {
  if (got == expected) return;
  fovea::invalid(where, std::string(name) + " is " + std::to_string(got) + "; expected " +
                            std::to_string(expected));
}

/// [sequences, heads, q_tiles, kv_tiles] of the longest sequence.
struct TileShape {
  std::int64_t sequences = 0, heads = 0, q_tiles = 0, kv_tiles = 0;

  explicit TileShape(const BlockMap& map) : sequences(map.num_sequences()), heads(map.num_heads()) {
    for (std::int64_t i = 0; i < sequences; ++i) {
      q_tiles = std::max(q_tiles, map.num_q_tiles(i));
      kv_tiles = std::max(kv_tiles, map.num_kv_tiles(i));
    }
  }
  std::size_t count() const {
    return static_cast<std::size_t>(sequences) * static_cast<std::size_t>(heads) *
           static_cast<std::size_t>(q_tiles) * static_cast<std::size_t>(kv_tiles);
  }
};

/// visit(row, runs) for every row of tiles, sequence by sequence, head by head.
template <typename Visit>
void for_each_row(const BlockMap& map, const Visit& visit) {
  for (std::int64_t i = 0; i < map.num_sequences(); ++i) {
    for (std::int64_t h = 0; h < map.num_heads(); ++h) {
      for (std::int64_t q_tile = 0; q_tile < map.num_q_tiles(i); ++q_tile)
        visit(i, h, q_tile, map.row(q_tile, i, h));
    }
  }
}

void write_kinds(const BlockMap& map, const TileShape& shape, std::uint8_t* kinds) {
  std::fill_n(kinds, shape.count(), static_cast<std::uint8_t>(FOVEA_TILE_EMPTY));
  for_each_row(map, [&](std::int64_t i, std::int64_t h, std::int64_t q_tile, const auto& runs) {
    std::uint8_t* row = kinds + ((i * shape.heads + h) * shape.q_tiles + q_tile) * shape.kv_tiles;
    for (const TileRun& run : runs)
      std::fill(row + run.begin, row + run.end, static_cast<std::uint8_t>(run.kind));
  });
}

struct RunCounts {
  std::int64_t rows = 0, runs = 0;
};

RunCounts count_runs(const BlockMap& map) {
  RunCounts counts;
  for_each_row(map, [&](std::int64_t, std::int64_t, std::int64_t, const auto& runs) {
    ++counts.rows;
    counts.runs += static_cast<std::int64_t>(runs.size());
  });
  return counts;
}

void write_runs(const BlockMap& map, std::int64_t* row_begin, std::int32_t* to) {
  std::int64_t num_runs = 0;
  *row_begin++ = 0;
  for_each_row(map, [&](std::int64_t, std::int64_t, std::int64_t, const auto& runs) {
    for (const TileRun& run : runs) {
      *to++ = run.begin;
      *to++ = run.end;
      *to++ = static_cast<std::int32_t>(run.kind);
    }
    num_runs += static_cast<std::int64_t>(runs.size());
    *row_begin++ = num_runs;
  });
}

/// 0 is the default; less than 1 is refused.
int size_or(std::int32_t value, int otherwise, const std::string& label) {
  if (value < 0) fovea::invalid(label, "is " + std::to_string(value) + "; expected >= 0");
  return value == 0 ? otherwise : value;
}

/// Pictures are of one sequence and head: the first where the caller asks for all.
BlockMapSpec of_one(BlockMapSpec spec) {
  if (!spec.sequence) spec.sequence = 0;
  if (!spec.q_head) spec.q_head = 0;
  return spec;
}

}  // namespace

extern "C" {

int fovea_mask_tiles(const fovea_block_map_args* args, uint8_t* kinds, size_t num_kinds,
                     int64_t* shape, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_mask_tiles";
    require(shape, where, "shape");
    const BlockMap map = fovea::block_map(to_spec(args, where));
    const TileShape tiles(map);
    if (kinds != nullptr) {
      require_size(num_kinds, tiles.count(), where, "num_kinds");
      write_kinds(map, tiles, kinds);
    }
    const std::int64_t extents[] = {tiles.sequences, tiles.heads, tiles.q_tiles, tiles.kv_tiles};
    std::copy_n(extents, 4, shape);
  });
}

int fovea_mask_runs(const fovea_block_map_args* args, int64_t* row_begin, size_t num_row_begin,
                    int32_t* runs, size_t num_runs, int64_t* counts, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_mask_runs";
    require(counts, where, "counts");
    const BlockMap map = fovea::block_map(to_spec(args, where));
    const RunCounts needed = count_runs(map);
    if (row_begin != nullptr || runs != nullptr) {
      require_size(num_row_begin, static_cast<std::size_t>(needed.rows) + 1, where,
                   "num_row_begin");
      require_size(num_runs, static_cast<std::size_t>(needed.runs), where, "num_runs");
      require(row_begin, where, "row_begin");
      if (needed.runs > 0) require(runs, where, "runs");
      write_runs(map, row_begin, runs);
    }
    counts[0] = needed.rows;
    counts[1] = needed.runs;
  });
}

int fovea_mask_elements(const fovea_block_map_args* args, int64_t q_begin, int64_t kv_begin,
                        const DLTensor* visible, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_mask_elements";
    require(visible, where, "visible");
    const BlockMapSpec spec = to_spec(args, where);
    fovea::materialize_mask(
        spec, fovea::ffi::to_view(visible, fovea::ffi::Access::write, where + ": visible"), q_begin,
        kv_begin);
  });
}

int fovea_mask_print(const fovea_block_map_args* args, int32_t max_width, int32_t max_height,
                     char** text, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_mask_print";
    fovea::ffi::require_text(text, where);
    const int width = size_or(max_width, 96, where + ": max_width");
    const int height = size_or(max_height, 48, where + ": max_height");
    const BlockMap map = fovea::block_map(of_one(to_spec(args, where)));
    *text = fovea::ffi::copy_text(map.print(0, 0, width, height));
  });
}

int fovea_mask_draw(const fovea_block_map_args* args, int32_t max_size, uint8_t* rgb,
                    size_t num_bytes, int32_t* size, fovea_error** error) {
  return guarded(error, [&] {
    const std::string where = "fovea_mask_draw";
    require(size, where, "size");
    const int most = size_or(max_size, 1024, where + ": max_size");
    const BlockMap map = fovea::block_map(of_one(to_spec(args, where)));
    const fovea::MaskPicture picture = map.draw(0, 0, most);
    if (rgb != nullptr) {
      require_size(num_bytes, picture.rgb.size(), where, "num_bytes");
      std::ranges::copy(picture.rgb, rgb);
    }
    size[0] = picture.height;
    size[1] = picture.width;
  });
}

int fovea_tile_table(const fovea_tile_lists_args* args, fovea_error** error) {
  return guarded(error, [&] {
    using fovea::ffi::Access;
    using fovea::ffi::to_view;
    const std::string where = "fovea_tile_table";
    const auto c = fovea::ffi::read_struct(args, sizeof(fovea_tile_lists_args), where);
    fovea::tile_table({.indptr = to_view(c.indptr, Access::read, where + ": indptr"),
                       .indices = to_view(c.indices, Access::read, where + ": indices"),
                       .table = to_view(c.table, Access::write, where + ": table")});
  });
}

}  // extern "C"
