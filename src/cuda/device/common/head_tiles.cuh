// Rows of an operand, 128 of one head at a time, as CTAs of the kernels that round operands take them: quantize_k.cuh,
// quantize_v.cuh.
#pragma once

#include "common/packed_row.cuh"
#include "common/sequence.cuh"
#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/quantize_k.h"
#include "shared/tensor_params.h"

namespace fovea::cuda {

/// Rows of one sequence and head: where they lie, and how many there are.
struct HeadRows {
  const std::uint16_t* data;
  std::int64_t row_stride, col_stride;
  std::int32_t count;
};

/// Eight neighbouring elements of a row; zeros where there is no such row, and behind the problem's head_dim.
/// `operand`: its parameters, head_dim and is_aligned among them.
template <bool reads_elements, class Params>
FOVEA_DEVICE ptx::U32x4 load_eight(const HeadRows& rows, std::int64_t row, int channel,
                                   const Params& operand) {
  if (row >= rows.count || channel >= operand.head_dim) return {};
  const std::uint16_t* const first = rows.data + row * rows.row_stride;
  if (!reads_elements || operand.is_aligned != 0)
    return ptx::ld_global_nc(reinterpret_cast<const ptx::U32x4*>(first + channel));
  // By elements, which are shifted in one after the other: any alignment, any stride.
  ptx::U32x4 chunk{};
#pragma unroll 1
  for (int col = channel; col < channel + 8; ++col) {
    std::uint32_t bits = 0;
    if (col < operand.head_dim) bits = ptx::ld_global_nc(first + col * rows.col_stride);
    chunk = {chunk.x >> 16U | chunk.y << 16U, chunk.y >> 16U | chunk.z << 16U,
             chunk.z >> 16U | chunk.w << 16U, chunk.w >> 16U | bits << 16U};
  }
  return chunk;
}

/// Rows from `begin` on of a sequence and head. `number`: of its head's tiles. `row`: of row 0 of the sequence, among
/// those of all sequences and heads.
struct HeadTile {
  std::int32_t sequence, head, number, begin;
  std::int64_t row;
};

/// One operand's; packed sequences have tiles of their own. `num_tiles`: of a sequence and head, packed of a head.
template <bool is_packed>
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

  FOVEA_DEVICE_MEMBER HeadRows rows(std::int32_t sequence, std::int32_t head) const {
    const std::int64_t first = is_packed
                                   ? packed_rows(cu_seqlens, sequence, total).begin * x.row_stride
                                   : sequence * x.batch_stride;
    return {static_cast<const std::uint16_t*>(x.data) + first + head * x.head_stride, x.row_stride,
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

}  // namespace fovea::cuda
