// SHA-256: names and checksums of cubins. Source: FIPS 180-4.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace fovea::cuda::jit {

using Sha256 = std::array<std::uint8_t, 32>;

/// Bytes in, digest out. Texts are hashed with their length, so that no two lists of texts run together.
class Sha256Hasher {
 public:
  void add_bytes(std::span<const std::byte> bytes);
  void add_text(std::string_view text);
  void add_number(std::uint64_t value);
  void add_digest(const Sha256& digest) { add_bytes(std::as_bytes(std::span(digest))); }
  Sha256 finish();

 private:
  void compress(const std::uint8_t* chunk);

  static constexpr std::size_t kChunkBytes = 64;
  std::array<std::uint32_t, 8> state_{0x6a09e667U, 0xbb67ae85U, 0x3c6ef372U, 0xa54ff53aU,
                                      0x510e527fU, 0x9b05688cU, 0x1f83d9abU, 0x5be0cd19U};
  std::array<std::uint8_t, kChunkBytes> pending_{};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

Sha256 sha256(std::span<const std::byte> bytes);

/// 64 lower-case digits.
std::string to_hex(const Sha256& digest);

struct Sha256Hash {
  std::size_t operator()(const Sha256& digest) const;
};

}  // namespace fovea::cuda::jit
