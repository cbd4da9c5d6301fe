// Numbers that depend on (seed, stream, index) alone, so a tensor has the same values in every
// layout.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace fovea::testing {

/// SplitMix64. Source: Steele, Lea & Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014.
constexpr std::uint64_t mixed(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : key_(mixed(mixed(seed) + stream)) {}

  std::uint64_t bits(std::int64_t index) const {
    return mixed(key_ ^ mixed(static_cast<std::uint64_t>(index)));
  }
  /// In [0, 1).
  double uniform(std::int64_t index) const {
    return static_cast<double>(bits(index) >> 11U) * 0x1p-53;
  }
  /// In [0, count).
  std::int64_t below(std::int64_t count, std::int64_t index) const {
    return static_cast<std::int64_t>(bits(index) % static_cast<std::uint64_t>(count));
  }
  /// Box and Muller 1958.
  double normal(std::int64_t index) const {
    const double radius = std::sqrt(-2 * std::log(1 - uniform(2 * index)));
    return radius * std::cos(2 * std::numbers::pi * uniform(2 * index + 1));
  }

 private:
  std::uint64_t key_;
};

}  // namespace fovea::testing
