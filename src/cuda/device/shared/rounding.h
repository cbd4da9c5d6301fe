// Which recipe of eight bits a kernel rounds or multiplies by: what shares a scale, and what probabilities become.
// src/cuda/forward/quantized_recipe.cpp says which fields of a Quantization are which.
#pragma once

#include "shared/element.h"
#include "shared/types.h"

namespace fovea::cuda {

enum class Rounding : std::uint8_t {
  // `accurate`, `sage1` and `fast`: P and V in 16 bits; or V by tiles of keys, P without an exponential.
  rows,
  // `sage2`: V by channels, P by exponentials.
  lanes,
  // `fp8_static`: all by scales that the call gives, for sequences and kv heads.
  given,
};

/// What is taken from K before it is rounded: the mean of nothing, of 64 keys, of all keys of a sequence and head.
enum class KeyMean : std::uint8_t { none, sample, all };

/// Of Q and K.
constexpr Codes qk_codes(Rounding rounding) {
  return rounding == Rounding::given ? Codes::e4m3 : Codes::int8;
}

/// Codes of P are exponentials, rounded, relative to the greatest score in whole tiles of keys that share scales; the
/// row sums are of what is rounded. Else codes of P are made without an exponential, and summed themselves.
constexpr bool rounds_exponentials(Rounding rounding) { return rounding != Rounding::rows; }

constexpr bool smooths_keys(Rounding rounding) { return rounding != Rounding::given; }

}  // namespace fovea::cuda
