// Rows of a cache as codes: the bit rules of appending. Read formats.hpp for the formats themselves.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "fovea/dtype.hpp"

#include "quant/formats.hpp"

namespace fovea::quant {

/// Codes stand for numbers times a scale.
constexpr bool is_code(Dtype dtype) { return dtype == Dtype::i8 || dtype == Dtype::e4m3; }

constexpr float largest_code(Dtype dtype) { return dtype == Dtype::i8 ? kInt8Max : kE4m3Max; }

/// The scale of a row that has its own. Of a row that holds NaN or infinity it is NaN: who sees the row sees that.
inline float row_scale(std::span<const float> row, Dtype dtype) {
  float greatest = 0;
  for (const float x : row) {
    if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
    greatest = std::max(greatest, std::abs(x));
  }
  return scale_of(greatest, largest_code(dtype));
}

/// The code of a number times the reciprocal of its scale, as stored. i8 has no NaN: 0, since its row's scale is.
inline std::uint8_t code_bits(float scaled, Dtype dtype) {
  if (dtype == Dtype::e4m3) return e4m3_bits(scaled);
  if (std::isnan(scaled)) return 0;
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(int8_code(scaled)));
}

constexpr float code_value(std::uint8_t bits, Dtype dtype) {
  if (dtype == Dtype::e4m3) return e4m3_value(bits);
  return static_cast<float>(static_cast<std::int8_t>(bits));
}

}  // namespace fovea::quant
