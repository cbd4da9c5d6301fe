// What instructions of tcgen05 are told: addresses of tensor memory, descriptors, kinds of products, shapes of copies.
// The instructions are in ptx/tcgen05.cuh; their emulated twins read this too.
#pragma once

#include "shared/types.h"

namespace fovea::cuda::ptx {

/// A cell of tensor memory, or the first one of several: lane in the upper half, column of 32 bits in the lower.
struct TmemAddress {
  std::uint32_t bits;

  constexpr TmemAddress plus_columns(int count) const {
    return {bits + static_cast<std::uint32_t>(count)};
  }
  constexpr TmemAddress plus_lanes(int count) const {
    return {bits + (static_cast<std::uint32_t>(count) << 16)};
  }
};

/// Where an operand lies in shared memory, and how (tile/tcgen05_descriptor.cuh).
struct SmemDescriptor {
  std::uint64_t bits;
};

/// Types, shape and majors of a product; of one whose operands have scales, those of the scales, too.
struct InstructionDescriptor {
  std::uint32_t bits;
};
struct ScaledInstructionDescriptor {
  std::uint32_t bits;
};

/// What a product's operands are: f16 and bf16; tf32; e4m3, e5m2, e2m3, e3m2, e2m1, mixed; s8 and u8.
enum class Tcgen05Kind : std::uint8_t { f16, tf32, f8f6f4, i8 };

/// The same with a scale for each block of 16 or 32 along the depth: ue8m0, in mxf4nvf4_block16 also ue4m3.
enum class Tcgen05ScaledKind : std::uint8_t {
  mxf8f6f4_block32,
  mxf4_block32,
  mxf4nvf4_block32,
  mxf4nvf4_block16,
};

/// What tcgen05_cp copies: rows x bits of shared memory. warpx4: the 32 rows to all four quarters of the lanes;
/// warpx2_02_13: the 64 rows to both halves; warpx2_01_23: rows 0-31 to quarters 0 and 1, the others to 2 and 3.
enum class TmemCopy : std::uint8_t {
  rows128x256b,
  rows128x128b,
  rows64x128b_warpx2_02_13,
  rows64x128b_warpx2_01_23,
  rows32x128b_warpx4,
};

}  // namespace fovea::cuda::ptx
