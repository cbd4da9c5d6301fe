// A matrix of 16-bit elements in shared memory, row-major, its 16-byte chunks permuted so that eight neighbouring rows
// of one column lie in eight different bank groups: ldmatrix, cp.async and 16-byte accesses are all free of conflicts.
// Read the fragment loads of team/compute.cuh next.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::tile {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;

/// Rows of kWidth elements. Rows of 64k elements begin in one bank: eight rows differ by chunk ^ row % 8. Rows of 64k +
/// 32 begin in two alternating halves of the banks: pairs of rows differ by chunk ^ (row / 2) % 4.
template <int kWidth>
struct SwizzledRows {
  static_assert(kWidth % 32 == 0, "rows are padded to 32 elements");
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kChunks = kWidth / kChunkElements;
  static constexpr bool kIsWide = kWidth % 64 == 0;
  /// Chunks whose order depends on the row: the threads of a copy that share a row.
  static constexpr int kPeriod = kIsWide ? 8 : 4;
  static constexpr int kPeriodBytes = kPeriod * kChunkBytes;  // to the row's next kPeriod chunks

  FOVEA_DEVICE_MEMBER static int key(int row) { return kIsWide ? row & 7 : (row >> 1) & 3; }

  /// Byte offset of a chunk of a row.
  FOVEA_DEVICE_MEMBER static int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ key(row)) * kChunkBytes;
  }
};

/// kRows rows of kWidth elements as TMA writes them: panels of 64 elements one after the other, each with all rows.
template <int kWidth, int kRows>
struct PanelRows {
  static_assert(kWidth % 64 == 0, "rows are whole panels");
  static_assert(kRows % 8 == 0, "every panel begins where the pattern begins");
  static constexpr int kRowBytes = 128;  // to the next row
  static constexpr int kChunks = kWidth / kChunkElements;
  static constexpr int kPeriod = 8;
  static constexpr int kPeriodBytes = kRows * kRowBytes;

  /// Byte offset of a chunk of a row.
  FOVEA_DEVICE_MEMBER static int offset(int row, int chunk) {
    return chunk / kPeriod * kPeriodBytes + row * kRowBytes +
           (chunk % kPeriod ^ (row & 7)) * kChunkBytes;
  }
};

template <bool has_panels, int kWidth, int kRows>
struct RowsInMemory {
  using Type = SwizzledRows<kWidth>;
};
template <int kWidth, int kRows>
struct RowsInMemory<true, kWidth, kRows> {
  using Type = PanelRows<kWidth, kRows>;
};

}  // namespace fovea::cuda::tile
