// A matrix in shared memory whose rows are panels as wide as the swizzle (swizzle.cuh): eight neighbouring rows of one
// column lie in eight different bank groups, so ldmatrix, stmatrix, cp.async and accesses of 16 bytes are free of
// conflicts. Read matrix_descriptor.cuh (wgmma) or fragment.cuh (mma.sync) next.
//
// kRowBytes 256, Swizzle::bytes128:
//   Panels::apart   panel 0: rows 0..kRows-1, bytes 0..127   panel 1: rows 0..kRows-1, bytes 128..255
//   Panels::joined  row 0: bytes 0..255   row 1: bytes 0..255   ...
#pragma once

#include "tile/swizzle.cuh"

namespace fovea::cuda {

inline constexpr int kChunkBytes = 16;

enum class Panels : std::uint8_t {
  apart,   // one after the other, each with all rows: as TMA writes them and wgmma reads them
  joined,  // those of a row side by side: rows are whole, however many there are
};

/// The widest swizzle whose panels a row consists of.
constexpr Swizzle widest_swizzle(int row_bytes) {
  return row_bytes % 128 == 0  ? Swizzle::bytes128
         : row_bytes % 64 == 0 ? Swizzle::bytes64
         : row_bytes % 32 == 0 ? Swizzle::bytes32
                               : Swizzle::none;
}

/// `base` is a multiple of kAlignment. A row's bytes are its elements in order; which dimension of the matrix a row
/// runs along is the reader's affair.
template <int num_rows, int row_bytes, Swizzle swizzle = widest_swizzle(row_bytes),
          Panels panels = Panels::apart>
struct SharedTile {
  static constexpr int kRows = num_rows;
  static constexpr int kRowBytes = row_bytes;
  static constexpr Swizzle kSwizzle = swizzle;
  static constexpr int kSpan = static_cast<int>(swizzle_span(swizzle));
  static constexpr int kPanels = row_bytes / kSpan;
  static constexpr int kChunks = row_bytes / kChunkBytes;
  static constexpr int kPanelChunks = kSpan / kChunkBytes;
  static constexpr int kBytes = num_rows * row_bytes;
  static constexpr int kAlignment = static_cast<int>(swizzle_period(swizzle));
  /// From a row to the next, and from a panel of a row to its next.
  static constexpr int kRowPitch = panels == Panels::apart ? kSpan : row_bytes;
  static constexpr int kPanelBytes = panels == Panels::apart ? num_rows * kSpan : kSpan;
  static_assert(row_bytes % kSpan == 0, "a row consists of whole panels");
  static_assert(panels == Panels::joined || kPanels == 1 || kPanelBytes % kAlignment == 0,
                "every panel begins where the pattern of the swizzle begins");

  ptx::SharedAddress base;

  /// Where byte `byte` of row `row` lies; neighbours within 16 bytes stay neighbours.
  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress at(int row, int byte) const {
    if constexpr (panels == Panels::joined)
      return chunk(row, byte / kChunkBytes) + byte % kChunkBytes;
    const int panel = byte / kSpan;
    const int offset = row * kSpan + byte % kSpan;
    return base + panel * kPanelBytes + swizzled<swizzle>(static_cast<std::uint32_t>(offset));
  }

  /// Where the 16 bytes begin that are the row's chunk `chunk`.
  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress chunk(int row, int chunk) const {
    if constexpr (panels == Panels::joined)
      return base + (row * kRowPitch + (chunk ^ permutation(row)) * kChunkBytes);
    return at(row, kChunkBytes * chunk);
  }

  /// Chunk `first + steps` of a row, where `first_at` is where its chunk `first` lies, 0 or 1, and `steps` is even: one
  /// xor, whatever the row.
  FOVEA_DEVICE_MEMBER static constexpr ptx::SharedAddress chunk_ahead(ptx::SharedAddress first_at,
                                                                      int steps) {
    const int byte = kChunkBytes * steps;
    return (first_at ^ static_cast<ptx::SharedAddress>(byte % kSpan)) +
           static_cast<ptx::SharedAddress>(byte / kSpan * kPanelBytes);
  }

  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress panel(int panel) const {
    return base + panel * kPanelBytes;
  }

 private:
  /// In joined panels: what the swizzle XORs a row's numbers of chunks with, as if its panels lay apart.
  FOVEA_DEVICE_MEMBER static constexpr int permutation(int row) {
    return (row * kSpan >> 7) & (kPanelChunks - 1);
  }
};

/// Rows that threads copy and mma.sync multiplies.
template <int num_rows, int row_bytes>
using JoinedTile = SharedTile<num_rows, row_bytes, widest_swizzle(row_bytes), Panels::joined>;

}  // namespace fovea::cuda
