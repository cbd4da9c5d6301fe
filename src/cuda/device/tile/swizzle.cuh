// How 16-byte chunks of shared memory are permuted so that eight rows of one column lie in different banks. TMA, wgmma
// and our own loads and stores must agree on it. Read shared_tile.cuh next.
//
// A swizzle of S bytes works on rows of S bytes, S = 128, 64 or 32, one after the other: bits 4.. of an address, the
// chunk within 128 bytes, are XORed with bits 7.., which 128 bytes these are.
//
//   128 B, chunks of rows 0..7      64 B, two rows to a line       32 B, four rows to a line
//   0 1 2 3 4 5 6 7                 0 1 2 3 | 0 1 2 3              0 1 | 0 1 | 0 1 | 0 1
//   1 0 3 2 5 4 7 6                 1 0 3 2 | 1 0 3 2              1 0 | 1 0 | 1 0 | 1 0
//   2 3 0 1 6 7 4 5                 2 3 0 1 | 2 3 0 1
//   ...                             3 2 1 0 | 3 2 1 0
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

/// none: rows of one chunk, 16 bytes, which is what wgmma calls interleaved.
enum class Swizzle : std::uint8_t { none, bytes32, bytes64, bytes128 };

/// Bytes of a row.
FOVEA_DEVICE constexpr std::uint32_t swizzle_span(Swizzle swizzle) {
  return 16U << static_cast<std::uint32_t>(swizzle);
}

/// After so many bytes the pattern repeats; what a tile's address must be a multiple of. At least 128: TMA asks for
/// that.
FOVEA_DEVICE constexpr std::uint32_t swizzle_period(Swizzle swizzle) {
  return 128U << static_cast<std::uint32_t>(swizzle);
}

/// Where the byte at `address` of the plain layout lies. Hardware applies it to the whole address; for a tile at a
/// multiple of the period, applying it to the offset gives the same.
template <Swizzle swizzle>
FOVEA_DEVICE constexpr std::uint32_t swizzled(std::uint32_t address) {
  constexpr std::uint32_t kMask = (1U << static_cast<std::uint32_t>(swizzle)) - 1;
  return address ^ ((address >> 7 & kMask) << 4);
}

}  // namespace fovea::cuda
