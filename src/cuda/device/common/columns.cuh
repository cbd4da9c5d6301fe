// Rows of tensors of any dtype and strides, four columns a lane: what kernels read that join tensors of one shape.
#pragma once

#include "common/element.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/rows_param.h"

namespace fovea::cuda {

inline constexpr int kColumnsOfWarp = 128;  // at once

FOVEA_DEVICE std::int64_t row_place(const RowsParam& rows, std::int32_t batch, std::int32_t row,
                                    std::int32_t head) {
  return batch * rows.rows.batch_stride + row * rows.rows.row_stride + head * rows.rows.head_stride;
}

/// Four columns of a row as they lie in memory: of f32 a word each, of 16 bits two in each of the first
/// two words. They are not looked at where they are loaded, so that those of several tensors are on their way together.
/// The grid writes this memory too: later, and the threads that read it.
FOVEA_DEVICE ptx::U32x4 load_columns(const RowsParam& rows, std::int64_t at, int col, int count) {
  const std::int64_t first = at + col * rows.rows.col_stride;
  const auto* const words = static_cast<const std::uint32_t*>(rows.rows.data);
  const auto* const halves = static_cast<const std::uint16_t*>(rows.rows.data);
  const bool is_f32 = rows.element == Element::f32;
  if (rows.is_aligned != 0 && count == 4) {
    if (is_f32) return ptx::ld_global(reinterpret_cast<const ptx::U32x4*>(words + first));
    const auto pairs = ptx::ld_global(reinterpret_cast<const ptx::U32x2*>(halves + first));
    return {pairs.x, pairs.y, 0, 0};
  }
  std::uint32_t bits[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= count) break;
    const std::int64_t from = first + i * rows.rows.col_stride;
    if (is_f32) {
      bits[i] = ptx::ld_global(words + from);
    } else {
      bits[i / 2] |= std::uint32_t{ptx::ld_global(halves + from)} << (i % 2 * 16);
    }
  }
  return {bits[0], bits[1], bits[2], bits[3]};
}

FOVEA_DEVICE ptx::F32x4 floats_of(const ptx::U32x4& bits, Element element) {
  if (element == Element::f32) {
    return {ptx::bit_cast<float>(bits.x), ptx::bit_cast<float>(bits.y),
            ptx::bit_cast<float>(bits.z), ptx::bit_cast<float>(bits.w)};
  }
  if (element == Element::bf16) {
    return {ptx::f32_of_bf16_lo(bits.x), ptx::f32_of_bf16_hi(bits.x), ptx::f32_of_bf16_lo(bits.y),
            ptx::f32_of_bf16_hi(bits.y)};
  }
  return {ptx::f32_of_f16_lo(bits.x), ptx::f32_of_f16_hi(bits.x), ptx::f32_of_f16_lo(bits.y),
          ptx::f32_of_f16_hi(bits.y)};
}

FOVEA_DEVICE void store_columns(const RowsParam& rows, std::int64_t at, int col, int count,
                                const ptx::F32x4& sum) {
  void* const to = const_cast<void*>(rows.rows.data);
  const std::int64_t first = at + col * rows.rows.col_stride;
  if (rows.is_aligned != 0 && count == 4 && rows.element == Element::f32) {
    ptx::st_global(reinterpret_cast<ptx::F32x4*>(static_cast<float*>(to) + first), sum);
    return;
  }
  if (rows.is_aligned != 0 && count == 4) {
    const bool is_bf16 = rows.element == Element::bf16;
    const ptx::U32x2 pairs{is_bf16 ? ptx::cvt_bf16x2(sum.x, sum.y) : ptx::cvt_f16x2(sum.x, sum.y),
                           is_bf16 ? ptx::cvt_bf16x2(sum.z, sum.w) : ptx::cvt_f16x2(sum.z, sum.w)};
    ptx::st_global(reinterpret_cast<ptx::U32x2*>(static_cast<std::uint16_t*>(to) + first), pairs);
    return;
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) store_element(to, rows.element, first + i * rows.rows.col_stride, values[i]);
  }
}

}  // namespace fovea::cuda
