// A cubin as bytes in a file, with the words that list it: the content of a file of the disk cache,
// and a stretch of a kernel pack.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/jit/cubin.hpp"
#include "cuda/jit/sha256.hpp"

namespace fovea::cuda::jit {

struct CacheEntry {
  Cubin cubin;
  std::string label;
  std::string architecture;
  std::string compiler;  // version
};

/// Format, key and a checksum of the rest come first.
std::vector<std::byte> entry_to_bytes(const Sha256& key, const CacheEntry& entry);

struct ParsedEntry {
  CacheEntry entry;
  std::string why_bad;  // empty: whole, and of this key
};
ParsedEntry entry_from_bytes(std::span<const std::byte> bytes, const Sha256& key);

}  // namespace fovea::cuda::jit
