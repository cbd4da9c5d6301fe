// The 64 bits by which wgmma finds an operand in shared memory (PTX ISA, Warpgroup Level Matrix: matrix descriptor),
// for tiles of shared_tile.cuh.
//
//   bits  0-13  address / 16                  bits 49-51  0: tiles begin where the pattern of the swizzle begins
//   bits 16-29  leading offset / 16           bits 62-63  1, 2, 3: swizzle of 128, 64, 32 bytes; 0: none
//   bits 32-45  stride offset / 16
//
// Hardware walks an operand in blocks of 8 rows x one chunk of 16 bytes, rows of a block one span of the swizzle apart:
//
//                     next 8 rows of the tile          next panel of the tile
//   K-major           stride                           none: leading (chunks of one product); swizzled: next descriptor
//   MN-major          stride; none: leading            leading; none: stride
//
// In a K-major tile rows run along K: row m (or n), bytes k. In an MN-major tile rows run along M (or N): row k, bytes
// m.
#pragma once

#include "ptx/wgmma.cuh"
#include "shared/element.h"
#include "tile/shared_tile.cuh"

namespace fovea::cuda {

/// The type of operands of this element.
FOVEA_DEVICE constexpr ptx::WgmmaType wgmma_type(Element element) {
  return element == Element::f16 ? ptx::WgmmaType::f16 : ptx::WgmmaType::bf16;
}

/// Offsets in bytes, multiples of 16. Shared addresses of clusters carry the CTA's rank in bits 24 and up, which the
/// mask drops: they would end in the leading offset.
FOVEA_DEVICE constexpr ptx::MatrixDescriptor matrix_descriptor(ptx::SharedAddress address,
                                                               std::uint32_t leading_bytes,
                                                               std::uint32_t stride_bytes,
                                                               Swizzle swizzle) {
  const std::uint32_t layout = (4 - static_cast<std::uint32_t>(swizzle)) & 3;
  const std::uint32_t low = (address & 0x3FFFFU) >> 4 | (leading_bytes >> 4) << 16;
  const std::uint32_t high = stride_bytes >> 4 | layout << 30;
  return static_cast<std::uint64_t>(high) << 32 | low;
}

/// The operand `bytes` further on, a multiple of 16. The address field must not overflow: tiles end below 256 KB, which
/// all do.
FOVEA_DEVICE constexpr ptx::MatrixDescriptor advanced(ptx::MatrixDescriptor descriptor, int bytes) {
  const std::uint32_t low =
      static_cast<std::uint32_t>(descriptor) + static_cast<std::uint32_t>(bytes / 16);
  return (descriptor >> 32 << 32) | low;
}

/// The operand whose first row of M (or N) is the tile's row 0 and whose depth begins at byte 0.
template <class Tile>
FOVEA_DEVICE constexpr ptx::MatrixDescriptor k_major_descriptor(const Tile& tile) {
  // The leading offset of a swizzled K-major operand is not read; 16 is what the manual asks for.
  constexpr bool kIsPlain = Tile::kSwizzle == Swizzle::none;
  return matrix_descriptor(tile.base, kIsPlain ? Tile::kPanelBytes : 16, 8 * Tile::kSpan,
                           Tile::kSwizzle);
}

/// Bytes from the operand of k_major_descriptor to the one 32 bytes deeper `k_step` times: what advanced() takes.
template <class Tile>
FOVEA_DEVICE constexpr int k_major_offset(int k_step) {
  const int byte = 32 * k_step;
  return byte / Tile::kSpan * Tile::kPanelBytes + byte % Tile::kSpan;
}

/// The operand of 16 bits whose depth begins at the tile's row 0 and whose first element of M (or N) is at byte 0.
template <class Tile>
FOVEA_DEVICE constexpr ptx::MatrixDescriptor mn_major_descriptor(const Tile& tile) {
  constexpr bool kIsPlain = Tile::kSwizzle == Swizzle::none;
  constexpr int kRowsOffset = 8 * Tile::kSpan;
  return matrix_descriptor(tile.base, kIsPlain ? kRowsOffset : Tile::kPanelBytes,
                           kIsPlain ? Tile::kPanelBytes : kRowsOffset, Tile::kSwizzle);
}

/// Bytes from the operand of mn_major_descriptor to the one 16 rows of the tile deeper `k_step` times.
template <class Tile>
FOVEA_DEVICE constexpr int mn_major_offset(int k_step) {
  return 16 * Tile::kSpan * k_step;
}

}  // namespace fovea::cuda
