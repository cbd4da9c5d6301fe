// Which thread holds which element: fragments of mma.sync (one warp, m16n8) and of wgmma (a warpgroup, m64nN, each warp
// 16 rows). A row of an accumulator lies in a quad, four lanes in a row, so a maximum or a sum over a row is a local
// one and two shuffles.
//
//   accumulator, i = register:   row lane/4 + 8 (i/2 % 2)    column 8 (i/4) + 2 (lane%4) + i%2
//   a, 16 bits, register r:      row lane/4 + 8 (r%2)        depth 8 (r/2) + 2 (lane%4), and the next
//   a,  8 bits, register r:      row lane/4 + 8 (r%2)        depth 16 (r/2) + 4 (lane%4), and the next three
//   b, 16 bits, register r:      column lane/4               depth 8 r + 2 (lane%4), and the next
//
// Accumulators 8k..8k+7 of a product are, packed in pairs, registers 0..3 of an a of 16 bits that begins at depth 16 k.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

struct Coordinate {
  int row, column;
};

/// Of accumulator `i` of mma.sync (i up to 3) or, with i counted on through tiles of 8 columns, of a row of such
/// products.
FOVEA_DEVICE constexpr Coordinate accumulator_coordinate(int lane, int i) {
  return {lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2};
}

/// Of accumulator `i` of wgmma; `thread` counts within the warpgroup.
FOVEA_DEVICE constexpr Coordinate wgmma_coordinate(int thread, int i) {
  const Coordinate in_warp = accumulator_coordinate(thread % 32, i);
  return {16 * (thread / 32) + in_warp.row, in_warp.column};
}

/// Of the first element in register `r` of an a of 16 bits.
FOVEA_DEVICE constexpr Coordinate a_coordinate_16_bit(int lane, int r) {
  return {lane / 4 + 8 * (r % 2), 8 * (r / 2) + 2 * (lane % 4)};
}

/// Of the first element in register `r` of an a of 8 bits.
FOVEA_DEVICE constexpr Coordinate a_coordinate_8_bit(int lane, int r) {
  return {lane / 4 + 8 * (r % 2), 16 * (r / 2) + 4 * (lane % 4)};
}

/// Accumulators of neighbouring tiles of 8 columns, counted on through them.
template <int n>
FOVEA_DEVICE auto in_one_row(float (&tiles)[n][4]) -> float (&)[4 * n] {
  return reinterpret_cast<float(&)[4 * n]>(tiles);
}

}  // namespace fovea::cuda
