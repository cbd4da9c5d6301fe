// Kernel pack: one file of prebuilt cubins with an index, so that a machine without NVRTC, or before
// its first compilation, has its kernels. Made by `fovea pack`.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda/jit/entry.hpp"
#include "cuda/jit/trust.hpp"

namespace fovea::cuda::jit {

struct PackItem {
  Sha256 key{};  // text_key: no compiler version in it, the pack's own is as good as any
  CacheEntry entry;
};

/// Appears whole or not at all, with the text of a tuning (cuda/forward/tuning.hpp; empty: none). Throws
/// InvalidArgument where the file cannot be written, and where two items have one key.
void write_pack(const std::string& path, std::span<const PackItem> items,
                std::string_view tuning = {});

class KernelPack {
 public:
  /// Reads the index; cubins are read, and checked, when they are asked for. Throws InvalidArgument
  /// where the file is not a pack of this format, and where others than this user and root may have
  /// written it (trust.hpp), with the reason.
  explicit KernelPack(const std::string& path);

  /// Empty where the pack lacks it, or where its bytes do not pass their checksum.
  std::optional<CacheEntry> find(const Sha256& key) const;

  struct Listed {
    Sha256 key{};
    std::string label, architecture, compiler;
    std::int64_t bytes = 0;
  };
  std::vector<Listed> list() const;
  const std::string& path() const { return path_; }
  /// Empty where none was packed.
  const std::string& tuning() const { return tuning_; }

 private:
  std::string read_index();

  struct Place {
    std::uint64_t offset = 0, bytes = 0;  // in the file
    std::string label, architecture, compiler;
  };

  std::string path_, tuning_;
  Descriptor file_;
  std::unordered_map<Sha256, Place, Sha256Hash> index_;
};

/// FOVEA_PACK; else fovea.pack beside the library; else that of the wheel fovea-kernels (python_sites()); empty where
/// there is none.
std::optional<std::string> default_pack_path();

}  // namespace fovea::cuda::jit
