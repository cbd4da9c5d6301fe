// Where an operand of a product lies in shared memory: what SharedTile and its descriptors say, for sizes known at run
// time only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "ptx/wgmma.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::conformance {

inline constexpr int kSteps = 2;  // products of one case
inline constexpr int kDepthBytes = 32;
inline constexpr std::array<Swizzle, 4> kSwizzles{Swizzle::none, Swizzle::bytes32, Swizzle::bytes64,
                                                  Swizzle::bytes128};

inline int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct OperandTile {
  ptx::Major major;
  Swizzle swizzle;
  int rows, row_bytes;     // of the tile
  int first_step;          // depths that the tile holds before the matrix
  std::uint32_t base = 0;  // in shared memory

  int span() const { return static_cast<int>(swizzle_span(swizzle)); }
  int panel_bytes() const { return rows * span(); }
  int bytes() const { return rows * row_bytes; }

  std::uint32_t address(int row, int byte) const {
    const auto offset = static_cast<std::uint32_t>(row * span() + byte % span());
    const std::uint32_t mask = (1U << static_cast<int>(swizzle)) - 1;
    return base + static_cast<std::uint32_t>(byte / span() * panel_bytes()) +
           (offset ^ ((offset >> 7U & mask) << 4U));
  }

  /// Of so many rows of an MN-major tile to a step, which says nothing where it is K-major.
  std::uint64_t descriptor(int step, int rows_of_step = 16) const {
    const bool is_plain = swizzle == Swizzle::none;
    const auto panel = static_cast<std::uint32_t>(panel_bytes()),
               rows_offset = static_cast<std::uint32_t>(8 * span());
    if (major == ptx::Major::k) {
      const int byte = kDepthBytes * (first_step + step);
      return advanced(matrix_descriptor(base, is_plain ? panel : 16, rows_offset, swizzle),
                      byte / span() * panel_bytes() + byte % span());
    }
    return advanced(matrix_descriptor(base, is_plain ? rows_offset : panel,
                                      is_plain ? panel : rows_offset, swizzle),
                    rows_of_step * span() * (first_step + step));
  }
};

/// Of a matrix of so many rows, with kSteps steps of depth, whose elements have so many bytes. There is room for one
/// step before the matrix where a K-major row is long enough, and always where it is MN-major.
inline OperandTile operand_tile(int rows, int bytes, ptx::Major major, Swizzle swizzle) {
  const int span = static_cast<int>(swizzle_span(swizzle));
  if (major == ptx::Major::k) {
    const int row_bytes = std::max(span, kSteps * kDepthBytes);
    const int first_step = row_bytes / kDepthBytes > kSteps ? 1 : 0;
    return {.major = major,
            .swizzle = swizzle,
            .rows = rows,
            .row_bytes = row_bytes,
            .first_step = first_step};
  }
  return {.major = major,
          .swizzle = swizzle,
          .rows = kDepthBytes / bytes * (kSteps + 1),
          .row_bytes = round_up(rows * bytes, span),
          .first_step = 1};
}

}  // namespace fovea::cuda::conformance
