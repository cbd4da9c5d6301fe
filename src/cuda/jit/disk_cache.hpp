// Cubins in a folder, named by the digest of all that shapes them. Many processes may use one folder
// at once, and any may be killed at any moment: a file appears whole, by rename, or not at all, and
// what is read is checked against its name and its checksum. What others than this user and root may
// have written is not used (trust.hpp): cubins run in the user's process. Nothing here ever throws for the disk's
// sake: a cache that fails is a cache that misses.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/entry.hpp"

namespace fovea::cuda::jit {

class DiskCache {
 public:
  struct Options {
    std::string folder;  // made when first written to; empty: no cache
    std::int64_t max_bytes = std::int64_t{512}
                             << 20U;  // of all entries; the least recently used go first
  };

  struct Listed {
    std::string file;  // name in the folder
    std::int64_t bytes = 0;
    std::int64_t last_used = 0;  // seconds since 1970
    std::string label, architecture, compiler;
    std::string why_bad;  // empty: whole and right
  };

  explicit DiskCache(Options options);

  /// A hit marks the entry as used. What is not whole is removed and missed.
  std::optional<CacheEntry> find(const Sha256& key);
  /// Replaces what is there. False where it cannot be kept; why_not_kept() says why.
  bool store(const Sha256& key, const CacheEntry& entry);

  /// Forgets an entry that does not serve, though it is whole.
  void remove(const Sha256& key);

  /// Every file that bears an entry's name, read and checked, most recently used first. None of a folder
  /// that is not used.
  std::vector<Listed> list() const;
  struct Removed {
    int files = 0;
    std::int64_t bytes = 0;
  };
  /// All entries and leftovers of ours; files of others stay.
  Removed clear();
  /// Entries that do not pass their check.
  Removed remove_bad();

  const Options& options() const { return options_; }
  std::string why_not_kept() const;
  /// Why nothing is read from the folder or written to it; empty: it serves, or will once it is made.
  std::string why_unused() const;

  /// A text of a line remembered beside the entries ("compiler <stamp>" -> "13.0.88"); same promises.
  std::optional<std::string> find_note(const Sha256& key);
  void store_note(const Sha256& key, const std::string& text);

 private:
  bool keep(const std::string& name, std::span<const std::byte> bytes);
  void evict_all_but(const std::string& kept);
  void remember_failure(const std::string& why);

  Options options_;
  mutable std::mutex mutex_;  // of why_not_kept_
  std::string why_not_kept_;
};

/// FOVEA_CACHE_DIR, XDG_CACHE_HOME/fovea or HOME/.cache/fovea; FOVEA_CACHE_MAX_MIB.
DiskCache::Options default_disk_cache();

}  // namespace fovea::cuda::jit
