// Numbers and texts in files: little-endian, lengths before texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/sha256.hpp"

namespace fovea::cuda::jit {

class ByteWriter {
 public:
  void put_bytes(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void put_number(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<std::byte>(value >> (8 * i)));
  }
  void put_text(std::string_view text) {
    put_number(text.size());
    put_bytes(std::as_bytes(std::span(text)));
  }
  void put_digest(const Sha256& digest) { put_bytes(std::as_bytes(std::span(digest))); }

  std::vector<std::byte> take() { return std::move(bytes_); }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads what a ByteWriter wrote. Past the end it gives zeros and empty texts, and is_whole() is false.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  std::span<const std::byte> get_bytes(std::uint64_t count) {
    if (count > rest_.size()) {
      is_whole_ = false;
      rest_ = {};
      return {};
    }
    const auto taken = rest_.first(static_cast<std::size_t>(count));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  std::uint64_t get_number() {
    const auto taken = get_bytes(8);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < taken.size(); ++i)
      value |= std::to_integer<std::uint64_t>(taken[i]) << (8 * i);
    return value;
  }
  int get_int() { return static_cast<int>(get_number()); }
  std::string get_text() {
    const auto taken = get_bytes(get_number());
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  Sha256 get_digest() {
    Sha256 digest{};
    const auto taken = get_bytes(digest.size());
    for (std::size_t i = 0; i < taken.size(); ++i)
      digest[i] = std::to_integer<std::uint8_t>(taken[i]);
    return digest;
  }

  std::span<const std::byte> rest() const { return rest_; }
  bool is_whole() const { return is_whole_; }

 private:
  std::span<const std::byte> rest_;
  bool is_whole_ = true;
};

}  // namespace fovea::cuda::jit
