// Keys and values of a tile in LDS, laid out so that the lanes of a wave meet in no bank when they read what a product
// takes. Chapter 1 of cdna/attention_forward.cuh; read wave.cuh next.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::cdna {

inline constexpr int kChunkBytes =
    16;  // eight elements of 16 bits: what a lane brings to a product

constexpr int least_of(int a, int b) { return a < b ? a : b; }

/// Rows as they are in memory, units of each permuted. `line_bytes` of LDS have each bank once, and as many rows as a
/// line has units, or all that a row has, get different permutations: lanes that read one unit of neighbouring rows
/// read different banks.
template <int num_rows, int row_bytes, int line_bytes, int unit_bytes>
struct CopiedTile {
  static constexpr int kRowBytes = row_bytes;
  static constexpr int kBytes = num_rows * row_bytes;
  static constexpr int kRowsOfLine = row_bytes < line_bytes ? line_bytes / row_bytes : 1;
  static constexpr int kPermuted = least_of(row_bytes, line_bytes) / unit_bytes;
  static_assert((row_bytes & (row_bytes - 1)) == 0, "a permutation of units is an xor");

  ptx::SharedAddress base;

  /// What is xored to places in a row.
  FOVEA_DEVICE_MEMBER static constexpr ptx::SharedAddress permutation(int row) {
    return static_cast<ptx::SharedAddress>((row / kRowsOfLine & (kPermuted - 1)) * unit_bytes);
  }
  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress at(int row, int byte) const {
    return base + static_cast<ptx::SharedAddress>(row * row_bytes) +
           (static_cast<ptx::SharedAddress>(byte) ^ permutation(row));
  }
};

/// Keys: a lane reads a chunk of its row. (Of gfx950's 64 lanes 16 are served together, {0-3, 12-15, 20-27} and so on:
/// these are different modulo 16.)
template <int num_rows, int row_bytes, int line_bytes>
using KeyTile = CopiedTile<num_rows, row_bytes, line_bytes, kChunkBytes>;

/// Values that are read transposed: 32 lanes read 32 columns of four rows.
template <int num_rows, int row_bytes, int line_bytes>
using TransposedTile = CopiedTile<num_rows, row_bytes, line_bytes, 64>;

/// Of the 16 keys of one product's depth, those of a lane: 4 half .. 4 half + 3, and the same 8 further on, as the
/// accumulators of Sᵀ have them. Eight values of one column, which are one operand, are a unit.
inline constexpr int kUnitKeys = 8;
FOVEA_DEVICE constexpr int first_key_of_unit(int unit) { return unit / 2 * 16 + unit % 2 * 4; }
FOVEA_DEVICE constexpr int key_in_unit(int i) { return i / 4 * 8 + i % 4; }

/// Values with their keys side by side: [unit of keys][column] chunks. A lane writes two neighbouring columns, and
/// reads one; columns of every second eight are swapped in pairs, so that lanes that write every second chunk reach
/// all banks.
template <int num_keys, int num_columns>
struct ValueTile {
  static constexpr int kUnits = num_keys / kUnitKeys;
  static constexpr int kUnitBytes = num_columns * kChunkBytes;

  ptx::SharedAddress base;

  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress chunk(int unit, int column) const {
    return base + static_cast<ptx::SharedAddress>(unit * kUnitBytes +
                                                  kChunkBytes * (column ^ (column >> 3 & 1)));
  }
};

}  // namespace fovea::cuda::cdna
