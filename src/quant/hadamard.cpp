#include "quant/hadamard.hpp"

#include <cmath>
#include <cstddef>

namespace fovea::quant {

namespace {

void flip_signs(std::span<float> row) {
  for (std::size_t d = 0; d < row.size(); ++d)
    if (is_flipped(static_cast<std::int64_t>(d))) row[d] = -row[d];
}

/// Its own inverse.
void mix(std::span<float> row) {
  const auto block =
      static_cast<std::size_t>(hadamard_block(static_cast<std::int64_t>(row.size())));
  for (std::size_t apart = 1; apart < block; apart *= 2) {
    for (std::size_t first = 0; first < row.size(); first += 2 * apart) {
      for (std::size_t d = first; d < first + apart; ++d) {
        const float a = row[d];
        const float b = row[d + apart];
        row[d] = a + b;
        row[d + apart] = a - b;
      }
    }
  }
  const float factor = 1 / std::sqrt(static_cast<float>(block));
  for (float& x : row) x *= factor;
}

}  // namespace

void rotate(std::span<float> row) {
  flip_signs(row);
  mix(row);
}

void rotate_back(std::span<float> row) {
  mix(row);
  flip_signs(row);
}

}  // namespace fovea::quant
