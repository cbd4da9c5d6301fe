// Numbers that are the same on every machine: a 64-bit linear congruential generator (Knuth, MMIX), its high bits.
#pragma once

#include <cstdint>

namespace fovea::cuda::conformance {

class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ULL + 1) {}

  std::uint32_t bits() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::uint32_t>(state_ >> 32U);
  }
  /// In least..greatest.
  int whole(int least, int greatest) {
    return least + static_cast<int>(bits() % static_cast<std::uint32_t>(greatest - least + 1));
  }

 private:
  std::uint64_t state_;
};

}  // namespace fovea::cuda::conformance
