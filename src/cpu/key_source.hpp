// Where the keys (or values) of a sequence lie: in a dense or packed tensor, in a slot of a cache, or in its pages. The
// walk over tiles asks for the rows of a tile and does not see the difference.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/scalar_io.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/operands.hpp"
#include "problem/cache.hpp"
#include "quant/row_codes.hpp"

namespace fovea::cpu {

/// What is known of a tile's rows one by one. Room for all of them.
struct RowList {
  const std::byte** rows = nullptr;  // written where they lie in several pages
  float* scales = nullptr;           // written of rows of codes; null: they are not asked for
};

class KeySource {
 public:
  /// A tensor, or one of the two of a cache.
  explicit KeySource(const TensorView& view) : rows_(view), page_size_(0) {}
  KeySource(const TensorView& view, const TensorView& scale, const KvCache& cache)
      : rows_(view),
        scales_(row_scales(scale)),
        pages_(cache),
        page_size_(is_paged(cache) ? view.size(1) : 0) {}

  /// Keys [begin, begin + count) of a sequence, count > 0.
  TileSource tile(const Sequence& sequence, std::int64_t kv_head, std::int64_t begin,
                  std::int64_t count, std::int64_t head_dim, const RowList& list) const {
    TileSource tile = rows_of(sequence, kv_head, begin, count, head_dim, list.rows);
    if (scales_.data == nullptr || list.scales == nullptr) return tile;
    for (std::int64_t i = 0; i < count; ++i)
      list.scales[i] = *scales_.at(sequence.index, place_of(sequence, begin + i), kv_head);
    tile.scales = list.scales;
    return tile;
  }

  /// Rows of a page; 0 where keys do not lie in pages.
  std::int64_t page_size() const { return page_size_; }
  /// Does a row hold all its heads before the next row begins? Strides of dimensions of one element may be any number.
  bool has_rows_first() const { return magnitude(rows_.head_stride) < magnitude(rows_.row_stride); }

 private:
  CacheRow place_of(const Sequence& sequence, std::int64_t key) const {
    const std::int64_t row = sequence.kv_begin + key;
    if (page_size_ == 0) return {sequence.slot, row};
    return {pages_.at(sequence.slot, row / page_size_), row % page_size_};
  }

  TileSource rows_of(const Sequence& sequence, std::int64_t kv_head, std::int64_t begin,
                     std::int64_t count, std::int64_t head_dim, const std::byte** row_list) const {
    TileSource tile{.dtype = rows_.dtype,
                    .row_stride = rows_.row_stride,
                    .col_stride = rows_.col_stride,
                    .num_rows = count,
                    .num_cols = head_dim};
    const std::int64_t first = sequence.kv_begin + begin;
    if (page_size_ == 0) {
      tile.data = rows_.at(sequence.slot, first, kv_head);
      return tile;
    }
    std::int64_t page = first / page_size_;
    std::int64_t row = first - page * page_size_;
    const auto row_of_page = [&] { return rows_.at(pages_.at(sequence.slot, page), row, kv_head); };
    if (row + count <= page_size_) {
      tile.data = row_of_page();
      return tile;
    }
    const std::int64_t row_bytes = tile.row_bytes();
    for (std::int64_t i = 0; i < count; ++page, row = 0) {
      const std::byte* at = row_of_page();
      const std::int64_t end = std::min(count, i + page_size_ - row);
      for (; i < end; ++i, at += row_bytes) row_list[i] = at;
    }
    tile.rows = row_list;
    return tile;
  }

  static std::uint64_t magnitude(std::int64_t stride) {
    const auto bits = static_cast<std::uint64_t>(stride);
    return stride < 0 ? 0 - bits : bits;
  }

  const Rows rows_;
  const RowScales scales_{};
  const PageIndex pages_;
  const std::int64_t page_size_;
};

/// An element of a tile: a code times its scale.
inline float element_of(const TileSource& tile, std::int64_t row, std::int64_t col) {
  const std::byte* from = tile.row(row);
  const std::int64_t at = col * tile.col_stride;
  if (tile.scales == nullptr) return load_scalar(from, tile.dtype, at);
  return quant::code_value(std::to_integer<std::uint8_t>(from[at]), tile.dtype) * tile.scales[row];
}

/// The rows of a tile side by side in `buffer`, for kernels that want them at one stride.
inline TileSource gathered(const TileSource& source, std::byte* buffer) {
  const auto element = static_cast<std::int64_t>(size_bytes(source.dtype));
  const std::int64_t to_bytes = source.num_cols * element;
  for (std::int64_t i = 0; i < source.num_rows; ++i) {
    const std::byte* from = source.row(i);
    std::byte* to = buffer + i * to_bytes;
    if (source.col_stride == 1) {
      std::memcpy(to, from, static_cast<std::size_t>(to_bytes));
      continue;
    }
    for (std::int64_t d = 0; d < source.num_cols; ++d)
      std::memcpy(to + d * element, from + d * source.col_stride * element,
                  static_cast<std::size_t>(element));
  }
  return {.data = buffer,
          .dtype = source.dtype,
          .row_stride = source.num_cols,
          .num_rows = source.num_rows,
          .num_cols = source.num_cols};
}

}  // namespace fovea::cpu
