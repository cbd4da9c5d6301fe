// Rows turned by their positions, in place or not.
//
//   (x, y) -> (x cos - y sin, x sin + y cos)        Su et al. 2021 (RoFormer), in f32, rounded once
//
// A CTA for each row, of a packed tensor a row of its sequence; its threads go through the pairs of all heads, one
// each, and then through the columns behind them, which are copied where out is not x. A thread reads and writes both
// elements of its pair, so that nobody reads what another has turned.
//
// Whatever positions and offsets hold, nothing outside of the tables is read: rows of a negative position are copied,
// those behind the last angles take these.
//
// Bound: memory; every element is read once and written once. One kernel takes any dtypes and strides: the branches are
// the same for a whole CTA.
#pragma once

#include "common/element.cuh"
#include "common/packed_row.cuh"
#include "common/sequence.cuh"
#include "shared/rotary_params.h"

namespace fovea::cuda {

/// Offsets of a row's head 0, and its position; negative: it is copied.
struct RotaryRow {
  std::int64_t x, out;
  std::int64_t position;
};

FOVEA_DEVICE RotaryRow rotary_row(const RotaryParams& p, std::int32_t row) {
  std::int32_t sequence = 0;
  std::int64_t idx = 0;
  RotaryRow result{};
  if (p.cu_seqlens.data != nullptr) {
    sequence = sequence_of(p.cu_seqlens, p.batch, row);
    const PackedRows mine = packed_rows(p.cu_seqlens, sequence, p.num_rows);
    idx = row - mine.begin;
    result = {row * p.x.row_stride, row * p.out.row_stride, -1};
    if (p.batch == 0 || idx < 0 || idx >= mine.count) return result;
  } else {
    sequence = row / p.seqlen;
    idx = row - sequence * p.seqlen;
    result = {sequence * p.x.batch_stride + idx * p.x.row_stride,
              sequence * p.out.batch_stride + idx * p.out.row_stride, -1};
  }
  if (p.positions.data != nullptr) {
    idx = p.cu_seqlens.data != nullptr
              ? index_at(p.positions, row)
              : index_at(p.positions, sequence * p.positions_row_stride, idx);
  } else if (p.offsets.data != nullptr) {
    idx += limited(index_at(p.offsets, sequence), -kMostCounted, kMostCounted);
  }
  result.position = limited(idx, -1, p.max_positions - 1);
  return result;
}

FOVEA_DEVICE float load_x(const RotaryParams& p, std::int64_t at, std::int32_t col) {
  return load_element(p.x.data, p.x_element, at + col * p.x.col_stride);
}
FOVEA_DEVICE void store_out(const RotaryParams& p, std::int64_t at, std::int32_t col, float value) {
  store_element(const_cast<void*>(p.out.data), p.out_element, at + col * p.out.col_stride, value);
}

/// Pair `pair` of a head that begins at these offsets. Products and sums are rounded each, as the CPU rounds them.
FOVEA_DEVICE void turn_pair(const RotaryParams& p, const RotaryRow& head, std::int32_t pair) {
  const std::int32_t first = p.is_interleaved != 0 ? 2 * pair : pair;
  const std::int32_t second = p.is_interleaved != 0 ? first + 1 : pair + p.num_pairs;
  const float cos = load_element(p.cos.data, p.cos_element,
                                 head.position * p.cos.row_stride + pair * p.cos.col_stride);
  float sin = load_element(p.sin.data, p.sin_element,
                           head.position * p.sin.row_stride + pair * p.sin.col_stride);
  if (p.is_conjugate != 0) sin = -sin;
  const float x = load_x(p, head.x, first);
  const float y = load_x(p, head.x, second);
  store_out(p, head.out, first, ptx::add_rn(ptx::mul_rn(x, cos), -ptx::mul_rn(y, sin)));
  store_out(p, head.out, second, ptx::add_rn(ptx::mul_rn(x, sin), ptx::mul_rn(y, cos)));
}

FOVEA_DEVICE RotaryRow head_of(const RotaryParams& p, const RotaryRow& row, std::int32_t head) {
  return {row.x + head * p.x.head_stride, row.out + head * p.out.head_stride, row.position};
}

FOVEA_DEVICE void rotary(const RotaryParams& p) {
  const RotaryRow row = rotary_row(p, static_cast<std::int32_t>(ptx::block_idx().x));
  const std::int32_t pairs = row.position < 0 ? 0 : p.num_pairs;
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < p.num_heads * pairs; i += ptx::block_dim().x) {
    const std::int32_t head = i / pairs;
    turn_pair(p, head_of(p, row, head), i - head * pairs);
  }
  if (p.is_in_place != 0) return;
  const std::int32_t rest = p.head_dim - 2 * pairs;
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < p.num_heads * rest; i += ptx::block_dim().x) {
    const std::int32_t head = i / rest;
    const RotaryRow at = head_of(p, row, head);
    const std::int32_t col = 2 * pairs + i - head * rest;
    store_out(p, at.out, col, load_x(p, at.x, col));
  }
}

}  // namespace fovea::cuda
