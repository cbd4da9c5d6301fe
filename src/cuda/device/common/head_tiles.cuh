// Rows of an operand, 128 of one head at a time, as CTAs of the kernels that round operands take them: quantize_k.cuh,
// quantize_v.cuh.
#pragma once

#include "common/codes.cuh"
#include "common/packed_row.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/quantize_k.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// Rows of one sequence and head: where they lie, and how many there are. `Stored`: elements of 16 bits, or codes of
/// e4m3, which are read as the numbers of bf16 that they stand for without their scale.
template <class Stored = std::uint16_t>
struct HeadRows {
  static constexpr bool kAreCodes = sizeof(Stored) == 1;

  const Stored* data;
  std::int64_t row_stride, col_stride;
  std::int32_t count;

  /// Eight elements of a row, from this column on: zeros where there is no such row, and behind head_dim. Rows begin at
  /// multiples of 16 bytes and are contiguous, of whole 16 bytes, unless they are read by elements and not aligned.
  template <bool reads_elements>
  FOVEA_DEVICE_MEMBER ptx::U32x4 eight(std::int64_t row, std::int32_t col, std::int32_t head_dim,
                                       bool is_aligned) const {
    if (row >= count || col >= head_dim) return {};
    const Stored* const first = data + row * row_stride;
    if constexpr (reads_elements) {
      if (!is_aligned) return gather(first, col, head_dim);
    }
    if constexpr (kAreCodes) {
      return numbers(ptx::ld_global_nc(reinterpret_cast<const ptx::U32x2*>(first + col)));
    } else {
      return ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(first + col));
    }
  }

 private:
  /// The same by elements, which are shifted in one after the other: any alignment, any stride.
  FOVEA_DEVICE_MEMBER ptx::U32x4 gather(const Stored* row, std::int32_t from,
                                        std::int32_t head_dim) const {
    ptx::U32x4 chunk{};
#pragma unroll 1
    for (int col = from; col < from + 8; ++col) {
      std::uint32_t bits = 0;
      if (col < head_dim) bits = ptx::ld_global_nc(row + col * col_stride);
      if constexpr (kAreCodes) bits = numbers({bits, 0}).x & 0xffffU;
      chunk = {chunk.x >> 16U | chunk.y << 16U, chunk.y >> 16U | chunk.z << 16U,
               chunk.z >> 16U | chunk.w << 16U, chunk.w >> 16U | bits << 16U};
    }
    return chunk;
  }

  /// Exact: a code has four bits. NaN, which is rare, is looked for in all eight at once.
  FOVEA_DEVICE ptx::U32x4 numbers(ptx::U32x2 codes) {
    constexpr Codes kCodes = Codes::e4m3;
    const auto pair = [](std::uint32_t word, int first) {
      return bf16_pair<kCodes>(word, word, first, first + 1);
    };
    ptx::U32x4 all{pair(codes.x, 0), pair(codes.x, 2), pair(codes.y, 0), pair(codes.y, 2)};
    if ((nan_bits<kCodes>(codes.x) | nan_bits<kCodes>(codes.y)) != 0) {
      all = {with_nan(all.x, codes.x), with_nan(all.y, codes.x >> 16U), with_nan(all.z, codes.y),
             with_nan(all.w, codes.y >> 16U)};
    }
    return all;
  }

  /// Of the first two codes of a word.
  FOVEA_DEVICE std::uint32_t with_nan(std::uint32_t pair, std::uint32_t codes) {
    if ((codes & 0x7fU) == 0x7fU) pair |= 0x7fc0U;
    return (codes & 0x7f00U) == 0x7f00U ? pair | 0x7fc00000U : pair;
  }
};

/// Rows from `begin` on of a sequence and head. `number`: of its head's tiles. `row`: of row 0 of the sequence, among
/// those of all sequences and heads.
struct HeadTile {
  std::int32_t sequence, head, number, begin;
  std::int64_t row;
};

/// One operand's; packed sequences have tiles of their own. `num_tiles`: of a sequence and head, packed of a head.
template <bool is_packed, class Stored = std::uint16_t>
struct HeadTiles {
  const BshdParam& x;
  const IndexParam& cu_seqlens;
  std::int64_t total;
  std::int32_t num_sequences, seqlen, num_heads, num_tiles;

  FOVEA_DEVICE_MEMBER HeadTile tile(std::int32_t cta) const {
    const std::int32_t pair = cta / num_tiles;
    const std::int32_t number = cta - pair * num_tiles;
    if constexpr (is_packed) return packed_tile(pair, number);
    const std::int32_t batch = pair / num_heads;
    return {batch, pair - batch * num_heads, number, number * kQuantizedTile,
            std::int64_t{pair} * seqlen};
  }

  FOVEA_DEVICE_MEMBER std::int32_t length(std::int32_t sequence) const {
    if constexpr (is_packed) return packed_rows(cu_seqlens, sequence, total).count;
    return seqlen;
  }

  FOVEA_DEVICE_MEMBER HeadRows<Stored> rows(std::int32_t sequence, std::int32_t head) const {
    const std::int64_t first = is_packed
                                   ? packed_rows(cu_seqlens, sequence, total).begin * x.row_stride
                                   : sequence * x.batch_stride;
    return {static_cast<const Stored*>(x.data) + first + head * x.head_stride, x.row_stride,
            x.col_stride, length(sequence)};
  }

 private:
  FOVEA_DEVICE_MEMBER HeadTile packed_tile(std::int32_t head, std::int32_t number) const {
    const auto first_tile = [&](std::int64_t sequence) {
      return first_packed_tile(sequence, limited(index_at(cu_seqlens, sequence), 0, total));
    };
    const std::int32_t sequence =
        last_sequence(num_sequences, [&](std::int64_t idx) { return first_tile(idx) <= number; });
    const std::int64_t idx = number - first_tile(sequence);
    return {sequence, head, number,
            static_cast<std::int32_t>(limited(idx, 0, number)) * kQuantizedTile,
            head * total + packed_rows(cu_seqlens, sequence, total).begin};
  }
};

template <bool is_packed, class Stored = std::uint16_t>
FOVEA_DEVICE HeadTiles<is_packed, Stored> tiles_of(const RowsToRound& p) {
  return {p.x,         p.cu_seqlens_kv, p.total_kv, p.num_sequences,
          p.seqlen_kv, p.num_heads_kv,  p.num_tiles};
}

}  // namespace fovea::cuda
