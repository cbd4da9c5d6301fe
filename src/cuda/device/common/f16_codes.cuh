// Codes of 8 bits as pairs of f16, which holds them exactly: operands of mma.sync. Read codes.cuh for codes as floats.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "shared/element.h"

namespace fovea::cuda {

/// Of the four codes of a word.
struct F16Pairs {
  std::uint32_t first, second;
};

/// The bytes of a word that two selectors of prmt name. One whose sign bit is turned over is the code and 128; behind
/// the upper byte of 1024, which selectors call 4, it is an f16.
FOVEA_DEVICE F16Pairs f16_of_int8(std::uint32_t word, std::uint32_t first, std::uint32_t second) {
  constexpr std::uint32_t kUpperByte = 0x64U, kMinus1152 = 0xe480e480U;
  const std::uint32_t turned = word ^ 0x80808080U;
  return {ptx::add_f16x2(ptx::prmt(turned, kUpperByte, first), kMinus1152),
          ptx::add_f16x2(ptx::prmt(turned, kUpperByte, second), kMinus1152)};
}

/// Codes 0 and 1, codes 2 and 3. NaN stays NaN.
template <Codes codes>
FOVEA_DEVICE F16Pairs f16_pairs(std::uint32_t word) {
  static_assert(codes != Codes::none);
  if constexpr (codes == Codes::int8) return f16_of_int8(word, 0x4140U, 0x4342U);
  return {ptx::f16x2_of_e4m3x2_lo(word), ptx::f16x2_of_e4m3x2_hi(word)};
}

/// Codes 0 and 2, codes 1 and 3: two rows' codes of one column, where ldmatrix has transposed pairs of columns.
template <Codes codes>
FOVEA_DEVICE F16Pairs f16_pairs_of_rows(std::uint32_t word) {
  static_assert(codes != Codes::none);
  if constexpr (codes == Codes::int8) return f16_of_int8(word, 0x4240U, 0x4341U);
  return f16_pairs<codes>(ptx::prmt(word, word, 0x3120U));
}

}  // namespace fovea::cuda
