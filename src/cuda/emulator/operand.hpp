// Where a matrix descriptor of wgmma finds its operand (PTX ISA, Warpgroup Level Matrix: shared memory layout).
#pragma once

#include <cstdint>

namespace fovea::cuda::emulator {

class OperandLayout {
 public:
  OperandLayout(std::uint64_t descriptor, bool is_k_major);

  /// Of the 16 bytes that hold, K-major: bytes 16 chunk.. of the depth of row (or column) `index`;
  /// MN-major: elements 8 chunk.. of the rows (or columns) at depth `index`. An address in the shared window.
  std::uint32_t chunk_address(std::uint32_t index, std::uint32_t chunk) const;

  /// Bits that this model gives no meaning: the base offset.
  bool has_base_offset() const { return base_offset_ != 0; }

 private:
  std::uint32_t start_, leading_, stride_, base_offset_;
  std::uint32_t swizzle_;  // log2 of the span / 16
  bool is_k_major_;
};

}  // namespace fovea::cuda::emulator
