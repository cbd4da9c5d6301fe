// The rotation of q and k that spreads what stands in few channels over many: q · k does not change.
#pragma once

#include <cstdint>
#include <span>

namespace fovea::quant {

/// Channels that are mixed: the greatest power of two that divides head_dim.
constexpr std::int64_t hadamard_block(std::int64_t head_dim) { return head_dim & -head_dim; }

/// The sign of a channel before mixing, of a fixed random pattern: a row of equal numbers would become one spike.
constexpr bool is_flipped(std::int64_t channel) {
  std::uint64_t x = static_cast<std::uint64_t>(channel) + 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return ((x ^ (x >> 31U)) & 1U) != 0;
}

/// Signs, then sums and differences of channels 1, 2, 4, ... apart, then a factor of 1 / √block; in f32, in this order.
void rotate(std::span<float> row);
/// What rotate has done, undone.
void rotate_back(std::span<float> row);

}  // namespace fovea::quant
