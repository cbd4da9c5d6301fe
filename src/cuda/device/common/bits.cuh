// Words of bits, as votes give them.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda {

/// Index of the lowest set bit of a word without sign, of 32 or 64 bits, by the exponent of a power of two: every
/// compiler of this text knows how. bits != 0.
template <class Word>
FOVEA_DEVICE std::int32_t lowest_bit(Word bits) {
  const auto power = static_cast<float>(bits & (Word{0} - bits));
  return static_cast<std::int32_t>(ptx::bit_cast<std::uint32_t>(power) >> 23U) - 127;
}

/// Index of the highest one, likewise, of a word below 2^24, which a float holds exactly. bits != 0.
FOVEA_DEVICE std::int32_t highest_bit(std::uint32_t bits) {
  return static_cast<std::int32_t>(ptx::bit_cast<std::uint32_t>(static_cast<float>(bits)) >> 23U) -
         127;
}

}  // namespace fovea::cuda
