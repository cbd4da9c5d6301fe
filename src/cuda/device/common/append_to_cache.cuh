// New tokens of a cache: keys and values are written behind what is there, keys and queries turned by their positions.
//
//   (x, y) -> (x cos - y sin, x sin + y cos)        Su et al. 2021 (RoFormer), in f32, rounded once
//
// A CTA for each token of each sequence (x) and each of k, v, q (y). Of packed tokens it looks for the sequence, a warp
// 32 of them at once. It finds from lengths, slots and pages, which lie
// on the device, where the token goes; then its threads go through the heads, 16 bytes of what is written each. Grid
// and addresses do not know what lengths and pages hold, so a captured graph appends wherever they say at its replay.
//
// A cache of codes is written a row of a head by a warp, which needs the row's greatest magnitude first: its scale is
// that by 127 (int8) or 448 (e4m3), in the bits of src/quant/row_codes.hpp.
//
// Whatever lengths, slots, pages and positions hold, nothing is written but rows of the cache: a token behind its
// capacity, or in a slot or page that there is not, is not written.
//
// Bound: memory; every element is read once (twice where it is turned) and written once. One kernel takes any dtypes
// and strides: the branches are the same for a whole CTA.
#pragma once

#include "common/codes.cuh"
#include "common/element.cuh"
#include "common/float_constants.cuh"
#include "common/packed_row.cuh"
#include "common/sequence.cuh"
#include "common/warp_reduce.cuh"
#include "shared/append_params.h"

namespace fovea::cuda {

/// A cache of any kind: what it is, is asked of parameters.
inline constexpr CacheKind kAnyCache{true, true};

struct NewToken {
  std::int32_t sequence, idx;  // idx: of `count` that the sequence has
  std::int32_t count;
  std::int64_t from;  // offset of its head 0
  std::int32_t row;   // of packed tokens
  bool exists;
};

FOVEA_DEVICE NewToken token_at(const AppendParams& p, const TokenRows& rows, std::int32_t row) {
  NewToken token{};
  if (row >= rows.num_rows) return token;
  token.row = row;
  token.count = rows.num_tokens;
  token.exists = true;
  if (rows.cu_seqlens.data == nullptr) {
    token.sequence = row / rows.num_tokens;
    token.idx = row - token.sequence * rows.num_tokens;
    token.from = token.sequence * rows.from.batch_stride + token.idx * rows.from.row_stride;
    return token;
  }
  token.sequence = sequence_of(rows.cu_seqlens, p.batch, row);
  const PackedRows mine = packed_rows(rows.cu_seqlens, token.sequence, rows.num_rows);
  token.idx = static_cast<std::int32_t>(row - mine.begin);
  token.count = mine.count;
  token.from = row * rows.from.row_stride;
  token.exists = token.idx >= 0 && token.idx < mine.count;
  return token;
}

/// Where a token is written to: the offset of its head 0, and in a cache its slot or page, and row.
struct Destination {
  std::int64_t at;
  bool exists;
  std::int64_t slot, row;
};
FOVEA_DEVICE Destination destination(const AppendParams& p, const TokenRows& rows,
                                     const NewToken& token) {
  if (rows.is_cached == 0 && rows.cu_seqlens.data != nullptr)
    return {token.row * rows.to.row_stride, true, 0, 0};
  std::int64_t slot = token.sequence;
  std::int64_t row = token.idx;
  if (rows.is_cached != 0) {
    const std::int64_t in_use = index_at(p.seqlens, token.sequence);
    if (in_use < 0 || in_use >= capacity_of<kAnyCache>(p, token.sequence) - token.idx) return {};
    row += in_use;
    if (p.page_table.data != nullptr) {
      const std::int64_t entry = static_cast<std::int32_t>(row) / p.page_size;
      std::int64_t table = token.sequence;
      if (p.page_indptr.data != nullptr)
        table = limited(index_at(p.page_indptr, token.sequence), 0, p.num_listed);
      slot = index_at(p.page_table, table * p.page_table_row_stride, entry);
      row -= entry * p.page_size;
    } else if (p.slots.data != nullptr) {
      slot = index_at(p.slots, token.sequence);
    }
    if (slot < 0 || slot >= p.num_slots) return {};
  }
  return {slot * rows.to.batch_stride + row * rows.to.row_stride, true, slot, row};
}

/// Negative before the first key, where there are no angles; behind the last angles there are, theirs.
FOVEA_DEVICE std::int64_t position_of(const AppendParams& p, const TokenRows& rows,
                                      const NewToken& token) {
  std::int64_t position = 0;
  if (rows.positions.data != nullptr) {
    position =
        rows.cu_seqlens.data != nullptr
            ? index_at(rows.positions, token.row)
            : index_at(rows.positions, token.sequence * rows.positions_row_stride, token.idx);
  } else {
    position = limited(index_at(p.seqlens, token.sequence), 0, p.capacity) +
               num_new_of<kAnyCache>(p, token.sequence) - token.count + token.idx;
    if (p.left_padding.data != nullptr)
      position -= limited(index_at(p.left_padding, token.sequence), 0, p.capacity);
  }
  return limited(position, -1, p.max_positions - 1);
}

/// One head of one token.
struct HeadRow {
  const TokenRows& rows;
  std::int64_t from, to;  // offsets of its elements

  FOVEA_DEVICE_MEMBER float load(std::int32_t col) const {
    return load_element(rows.from.data, rows.from_element, from + col * rows.from.col_stride);
  }
  FOVEA_DEVICE_MEMBER void store(std::int32_t col, float value) const {
    store_element(const_cast<void*>(rows.to.data), rows.to_element, to + col * rows.to.col_stride,
                  value);
  }
};

/// Products and sum are rounded each, as the CPU rounds them.
FOVEA_DEVICE float turned(const AppendParams& p, const HeadRow& row, std::int64_t position,
                          std::int32_t col) {
  const float mine = row.load(col);
  if (position < 0 || col >= 2 * p.num_pairs) return mine;
  const bool is_first = p.is_interleaved != 0 ? col % 2 == 0 : col < p.num_pairs;
  const std::int32_t apart = p.is_interleaved != 0 ? 1 : p.num_pairs;
  const std::int32_t pair = p.is_interleaved != 0 ? col / 2 : is_first ? col : col - p.num_pairs;
  const float other = row.load(is_first ? col + apart : col - apart);
  const float cos = load_element(p.cos.data, p.cos_element,
                                 position * p.cos.row_stride + pair * p.cos.col_stride);
  const float sin = load_element(p.sin.data, p.sin_element,
                                 position * p.sin.row_stride + pair * p.sin.col_stride);
  const float along = ptx::mul_rn(mine, cos);
  const float across = ptx::mul_rn(other, sin);
  return ptx::add_rn(along, is_first ? -across : across);
}

/// Columns of at most 16 bytes. All are loaded before the first is stored: the loads wait together.
FOVEA_DEVICE void write_columns(const AppendParams& p, const HeadRow& row, std::int64_t position,
                                std::int32_t begin, std::int32_t end) {
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (begin + i < end) values[i] = turned(p, row, position, begin + i);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (begin + i < end) row.store(begin + i, values[i]);
  }
}

/// 16 bytes of rows that are neither turned nor converted.
FOVEA_DEVICE void copy_columns(const HeadRow& row, std::int32_t begin) {
  const std::int32_t bytes = row.rows.to_element == Element::f32 ? 4 : 2;
  const auto* from = static_cast<const char*>(row.rows.from.data) + (row.from + begin) * bytes;
  auto* to = static_cast<char*>(const_cast<void*>(row.rows.to.data)) + (row.to + begin) * bytes;
  ptx::st_global(reinterpret_cast<ptx::U32x4*>(to),
                 ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(from)));
}

/// Columns of a row that a warp has at once: of lane l column l, l + 32, ... from `begin` on, 0 behind the last.
struct FourColumns {
  static constexpr int kColumns = 128;
  float x[4];

  FOVEA_DEVICE_MEMBER void load(const AppendParams& p, const HeadRow& row, std::int64_t position,
                                std::int32_t begin) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::int32_t col = begin + 32 * i + ptx::lane_idx();
      x[i] = col < row.rows.head_dim ? turned(p, row, position, col) : 0.0F;
    }
  }
};

/// What a row is divided by; NaN of one that holds NaN or infinity.
FOVEA_DEVICE float scale_of_row(float greatest, bool is_finite, Codes codes) {
  constexpr float kLeast = 0x1p-126F;  // its reciprocal is finite: zeros are no case of their own
  const float scale = ptx::div_rn(warp_max(greatest), largest_code(codes));
  return ptx::vote_all(is_finite) ? (scale > kLeast ? scale : kLeast) : quiet_nan();
}

/// Rows of codes: a warp for each head, which asks for the greatest magnitude first. A row that holds NaN or infinity
/// gets scale NaN and codes of 0.
FOVEA_DEVICE void append_codes(const AppendParams& p, const TokenRows& rows, const NewToken& token,
                               const Destination& to, std::int64_t position) {
  auto* const codes = static_cast<std::uint8_t*>(const_cast<void*>(rows.to.data));
#pragma unroll 1
  for (std::int32_t head = ptx::warp_idx(); head < rows.num_heads;
       head += ptx::block_dim().x / 32) {
    const HeadRow row{rows, token.from + head * rows.from.head_stride,
                      to.at + head * rows.to.head_stride};
    float* const at = scale_at(rows.scale, token.sequence, to.slot, to.row, head);
    FourColumns four{};
    float greatest = 0;
    bool is_finite = true;
#pragma unroll 1
    for (std::int32_t begin = 0; begin < rows.head_dim; begin += FourColumns::kColumns) {
      four.load(p, row, position, begin);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        is_finite = is_finite && ptx::abs(four.x[i]) < infinity();
        greatest = ptx::max_nan(greatest, ptx::abs(four.x[i]));
      }
    }
    float scale = 0;
    if (rows.scale.are_of_rows != 0) {
      scale = scale_of_row(greatest, is_finite, rows.codes);
      if (ptx::lane_idx() == 0) ptx::st_global(at, scale);
    } else {
      scale = ptx::ld_global_nc(at);
    }
    const bool is_shown = is_nan(scale);
    const float reciprocal = ptx::div_rn(1.0F, scale);
#pragma unroll 1
    for (std::int32_t begin = 0; begin < rows.head_dim; begin += FourColumns::kColumns) {
      if (rows.head_dim > FourColumns::kColumns) four.load(p, row, position, begin);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int32_t col = begin + 32 * i + ptx::lane_idx();
        const std::uint32_t code =
            is_shown ? 0 : code_of(rows.codes, ptx::mul_rn(four.x[i], reciprocal));
        if (col < rows.head_dim)
          ptx::st_global(codes + row.to + col * rows.to.col_stride,
                         static_cast<std::uint8_t>(code));
      }
    }
  }
}

FOVEA_DEVICE void append_to_cache(const AppendParams& p) {
  const TokenRows& rows = p.rows[ptx::block_idx().y];
  const NewToken token = token_at(p, rows, ptx::block_idx().x);
  if (!token.exists) return;
  const Destination to = destination(p, rows, token);
  if (!to.exists) return;
  const std::int64_t position = rows.is_turned != 0 ? position_of(p, rows, token) : -1;
  if (rows.codes != Codes::none) return append_codes(p, rows, token, to, position);
  const std::int32_t per_chunk = rows.to_element == Element::f32 ? 4 : 8;
  const std::int32_t chunks = ceil_div(rows.head_dim, per_chunk);
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < rows.num_heads * chunks; i += ptx::block_dim().x) {
    const std::int32_t head = i / chunks;
    const std::int32_t begin = (i - head * chunks) * per_chunk;
    const HeadRow row{rows, token.from + head * rows.from.head_stride,
                      to.at + head * rows.to.head_stride};
    if (rows.is_copied != 0) {
      copy_columns(row, begin);
    } else {
      write_columns(p, row, position, begin, least(begin + per_chunk, rows.head_dim));
    }
  }
}

}  // namespace fovea::cuda
