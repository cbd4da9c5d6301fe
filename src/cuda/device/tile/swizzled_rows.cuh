// A matrix of 16-bit elements in shared memory, row-major, its 16-byte chunks permuted so that eight neighbouring rows of one
// column lie in eight different bank groups: ldmatrix, cp.async and 16-byte accesses are all free of conflicts. Read
// the fragment loads of sm80/forward/compute.cuh next.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::tile {

inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkElements = 8;

/// Rows of kWidth elements. Rows of 64k elements begin in one bank: eight rows differ by chunk ^ row % 8. Rows of 64k + 32 begin
/// in two alternating halves of the banks: pairs of rows differ by chunk ^ (row / 2) % 4.
template <int kWidth>
struct SwizzledRows {
  static_assert(kWidth % 32 == 0, "rows are padded to 32 elements");
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kChunks = kWidth / kChunkElements;
  static constexpr bool kIsWide = kWidth % 64 == 0;
  /// Chunks whose order depends on the row: the threads of a copy that share a row.
  static constexpr int kPeriod = kIsWide ? 8 : 4;

  FOVEA_DEVICE_MEMBER static int key(int row) { return kIsWide ? row & 7 : (row >> 1) & 3; }

  /// Byte offset of a chunk of a row.
  FOVEA_DEVICE_MEMBER static int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ key(row)) * kChunkBytes;
  }
};

}  // namespace fovea::cuda::tile
