// A matrix in shared memory, as TMA writes it and wgmma and ldmatrix read it: panels as wide as the swizzle, one after
// the other, each with all rows. Read matrix_descriptor.cuh (wgmma) or fragment.cuh (mma.sync) next.
//
//   kRowBytes 256, Swizzle::bytes128:  panel 0: rows 0..kRows-1, bytes 0..127  panel 1: rows 0..kRows-1, bytes 128..255
#pragma once

#include "tile/swizzle.cuh"

namespace fovea::cuda {

/// `base` is a multiple of kAlignment. A row's bytes are its elements in order; which dimension of the matrix a row
/// runs along is the reader's affair.
template <int num_rows, int row_bytes, Swizzle swizzle>
struct SharedTile {
  static constexpr int kRows = num_rows;
  static constexpr int kRowBytes = row_bytes;
  static constexpr Swizzle kSwizzle = swizzle;
  static constexpr int kSpan = static_cast<int>(swizzle_span(swizzle));
  static constexpr int kPanels = row_bytes / kSpan;
  static constexpr int kPanelBytes = num_rows * kSpan;
  static constexpr int kBytes = num_rows * row_bytes;
  static constexpr int kAlignment = static_cast<int>(swizzle_period(swizzle));
  static_assert(row_bytes % kSpan == 0, "a row consists of whole panels");
  static_assert(kPanels == 1 || kPanelBytes % kAlignment == 0,
                "every panel begins where the pattern of the swizzle begins");

  ptx::SharedAddress base;

  /// Where byte `byte` of row `row` lies; neighbours within 16 bytes stay neighbours.
  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress at(int row, int byte) const {
    const int panel = byte / kSpan;
    const int offset = row * kSpan + byte % kSpan;
    return base + panel * kPanelBytes + swizzled<swizzle>(static_cast<std::uint32_t>(offset));
  }

  /// Where the 16 bytes begin that are the row's chunk `chunk`.
  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress chunk(int row, int chunk) const {
    return at(row, 16 * chunk);
  }

  /// Chunk `first + steps` of a row, where `first_at` is where its chunk `first` lies, 0 or 1, and `steps` is even: one
  /// xor, whatever the row.
  FOVEA_DEVICE_MEMBER static constexpr ptx::SharedAddress chunk_ahead(ptx::SharedAddress first_at,
                                                                      int steps) {
    const int panel = 16 * steps / kSpan;
    return (first_at ^ static_cast<ptx::SharedAddress>(16 * steps % kSpan)) +
           static_cast<ptx::SharedAddress>(panel * kPanelBytes);
  }

  FOVEA_DEVICE_MEMBER constexpr ptx::SharedAddress panel(int panel) const {
    return base + panel * kPanelBytes;
  }
};

}  // namespace fovea::cuda
