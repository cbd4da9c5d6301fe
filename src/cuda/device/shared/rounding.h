// Which recipe of eight bits a kernel rounds or multiplies by: what shares a scale, and what probabilities become.
// src/cuda/forward/quantized_recipe.cpp says which fields of a Quantization are which.
#pragma once

#include "shared/element.h"
#include "shared/types.h"

namespace fovea::cuda {

enum class Rounding : std::uint8_t {
  // `accurate` and `fast`: a scale for each row of Q and for what a lane holds of a tile of K, less the mean of a
  // sample; V by tiles of keys, P without an exponential.
  rows,
  // `sage2`: scales of Q and K for what a lane holds, K less the mean of all keys; V by channels.
  lanes,
  // `fp8_static`: all by scales that the call gives, for sequences and kv heads.
  given,
};

/// Of Q and K.
constexpr Codes qk_codes(Rounding rounding) {
  return rounding == Rounding::given ? Codes::e4m3 : Codes::int8;
}

/// Codes of P are exponentials, rounded, relative to the greatest score among whole tiles of kQuantizedTile keys; the
/// row sums are of what is rounded. Else codes of P are made without an exponential, and summed themselves.
constexpr bool rounds_exponentials(Rounding rounding) { return rounding != Rounding::rows; }

constexpr bool smooths_keys(Rounding rounding) { return rounding != Rounding::given; }

}  // namespace fovea::cuda
