// Decisions of a fuzzer, read from its bytes; behind their end all are 0.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace fovea::fuzz {

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::uint8_t next() { return position_ < size_ ? data_[position_++] : std::uint8_t{0}; }
  std::span<const std::uint8_t> rest() const { return {data_ + position_, size_ - position_}; }
  bool flag() { return next() % 2 == 1; }

  /// Zero and one, tile edges, the limits of head_dim, and what overflows a product or a sum.
  std::int64_t extent() {
    constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
    constexpr std::array<std::int64_t, 16> kExtents{0,
                                                    1,
                                                    2,
                                                    3,
                                                    4,
                                                    8,
                                                    64,
                                                    128,
                                                    512,
                                                    513,
                                                    -1,
                                                    std::int64_t{1} << 31,
                                                    std::int64_t{1} << 62,
                                                    kMax,
                                                    kMax / 2 + 1,
                                                    std::numeric_limits<std::int64_t>::min()};
    return kExtents[next() % kExtents.size()];
  }

  float number() {
    std::uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits = bits << 8U | next();
    return std::bit_cast<float>(bits);
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
};

}  // namespace fovea::fuzz
