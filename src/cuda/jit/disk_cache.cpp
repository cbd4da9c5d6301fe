#include "cuda/jit/disk_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <span>
#include <string_view>
#include <system_error>

#include "core/env.hpp"
#include "cuda/jit/files.hpp"
#include "cuda/jit/places.hpp"

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEntrySuffix = ".cubin";
constexpr std::string_view kNoteSuffix = ".note";
constexpr std::size_t kDigits = 64;
constexpr std::size_t kMaxEntryBytes = std::size_t{256} << 20U;  // no kernel is near it
constexpr std::size_t kMaxNoteBytes = 4096;
constexpr std::int64_t kAbandonedAfterSeconds = 3600;  // a write takes milliseconds

bool has_form(const std::string& name, std::string_view suffix) {
  return name.size() == kDigits + suffix.size() && name.ends_with(suffix) &&
         name.find_first_not_of("0123456789abcdef") == kDigits;
}

bool is_ours(const std::string& name) {
  return has_form(name, kEntrySuffix) || has_form(name, kNoteSuffix) || is_written_aside(name);
}

Sha256 key_of(const std::string& name) {
  const auto digit = [&](std::size_t at) {
    const char c = name[at];
    return static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10);
  };
  Sha256 key;
  for (std::size_t i = 0; i < key.size(); ++i)
    key[i] = static_cast<std::uint8_t>((digit(2 * i) << 4U) | digit(2 * i + 1));
  return key;
}

struct FoundFile {
  std::string path, name;
  std::int64_t bytes = 0;
  std::int64_t last_used = 0;  // nanoseconds since 1970
};

constexpr std::int64_t kSecond = 1'000'000'000;

/// Our regular files in the folder.
std::vector<FoundFile> find_files(const std::string& folder) {
  std::vector<FoundFile> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    struct stat status {};
    if (!is_ours(name) || ::lstat(it->path().c_str(), &status) != 0 || !S_ISREG(status.st_mode))
      continue;
    files.push_back({.path = it->path().string(),
                     .name = name,
                     .bytes = status.st_size,
                     .last_used = status.st_mtim.tv_sec * kSecond + status.st_mtim.tv_nsec});
  }
  return files;
}

std::int64_t now() { return ::time(nullptr) * kSecond; }

void mark_used(const std::string& path) { ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

/// Only its owner may write there: what lies there is run.
std::optional<std::string> make_folder(const std::string& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return std::nullopt;
  fs::create_directories(fs::path(folder).parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return std::nullopt;
  return fmt::format("{}: {}", folder, std::generic_category().message(errno));
}

}  // namespace

DiskCache::DiskCache(Options options) : options_(std::move(options)) {
  if (options_.max_bytes == 0) options_.folder.clear();
}

std::string DiskCache::path_of(const Sha256& key, std::string_view suffix) const {
  return fmt::format("{}/{}{}", options_.folder, to_hex(key), suffix);
}

std::optional<CacheEntry> DiskCache::find(const Sha256& key) {
  if (options_.folder.empty()) return std::nullopt;
  const std::string path = path_of(key, kEntrySuffix);
  const auto bytes = read_whole_file(path, kMaxEntryBytes);
  if (!bytes) return std::nullopt;
  ParsedEntry parsed = entry_from_bytes(*bytes, key);
  if (!parsed.why_bad.empty()) {
    // Where another process has just put a good one in its place, that one is lost: a compilation more.
    ::unlink(path.c_str());
    return std::nullopt;
  }
  mark_used(path);
  return std::move(parsed.entry);
}

bool DiskCache::store(const Sha256& key, const CacheEntry& entry) {
  if (options_.folder.empty()) return false;
  const std::vector<std::byte> bytes = entry_to_bytes(key, entry);
  if (static_cast<std::int64_t>(bytes.size()) > options_.max_bytes) {
    remember_failure(fmt::format("{}: a kernel of {} bytes is above the folder's size of {}",
                                 options_.folder, bytes.size(), options_.max_bytes));
    return false;
  }
  const std::string path = path_of(key, kEntrySuffix);
  if (!keep(path, bytes)) return false;
  evict_all_but(path);
  return true;
}

bool DiskCache::keep(const std::string& path, std::span<const std::byte> bytes) {
  auto why = make_folder(options_.folder);
  if (!why) why = write_whole_file(path, bytes);
  if (why) remember_failure(*why);
  return !why;
}

void DiskCache::evict_all_but(const std::string& kept) {
  std::vector<FoundFile> files = find_files(options_.folder);
  std::int64_t total = 0;
  const std::int64_t abandoned_before = now() - kAbandonedAfterSeconds * kSecond;
  std::erase_if(files, [&](const FoundFile& file) {
    const bool is_abandoned = is_written_aside(file.name) && file.last_used < abandoned_before;
    if (is_abandoned) ::unlink(file.path.c_str());
    if (!is_abandoned) total += file.bytes;
    return is_abandoned || is_written_aside(file.name);
  });
  if (total <= options_.max_bytes) return;
  std::sort(files.begin(), files.end(),
            [](const FoundFile& a, const FoundFile& b) { return a.last_used < b.last_used; });
  // A tenth more than needed, so that the next entries need no search.
  const std::int64_t wanted = options_.max_bytes - options_.max_bytes / 10;
  for (const FoundFile& file : files) {
    if (total <= wanted) break;
    if (file.path == kept) continue;  // times of the disk are too coarse to tell it from others
    if (::unlink(file.path.c_str()) == 0 || errno == ENOENT) total -= file.bytes;
  }
}

std::vector<DiskCache::Listed> DiskCache::list() const {
  std::vector<Listed> listed;
  if (options_.folder.empty()) return listed;
  for (const FoundFile& file : find_files(options_.folder)) {
    if (!has_form(file.name, kEntrySuffix)) continue;
    Listed row;
    row.file = file.name;
    row.bytes = file.bytes;
    row.last_used = file.last_used / kSecond;
    if (const auto bytes = read_whole_file(file.path, kMaxEntryBytes)) {
      ParsedEntry parsed = entry_from_bytes(*bytes, key_of(file.name));
      row.label = parsed.entry.label;
      row.architecture = parsed.entry.architecture;
      row.compiler = parsed.entry.compiler;
      row.why_bad = parsed.why_bad;
    } else {
      row.why_bad = "cannot be read";
    }
    listed.push_back(std::move(row));
  }
  std::sort(listed.begin(), listed.end(), [](const Listed& a, const Listed& b) {
    return a.last_used != b.last_used ? a.last_used > b.last_used : a.file < b.file;
  });
  return listed;
}

DiskCache::Removed DiskCache::clear() {
  Removed removed;
  for (const FoundFile& file : find_files(options_.folder)) {
    if (::unlink(file.path.c_str()) != 0) continue;
    ++removed.files;
    removed.bytes += file.bytes;
  }
  return removed;
}

DiskCache::Removed DiskCache::remove_bad() {
  Removed removed;
  for (const Listed& row : list()) {
    if (row.why_bad.empty()) continue;
    if (::unlink(fmt::format("{}/{}", options_.folder, row.file).c_str()) != 0) continue;
    ++removed.files;
    removed.bytes += row.bytes;
  }
  return removed;
}

std::string DiskCache::why_not_kept() const {
  const std::lock_guard lock(mutex_);
  return why_not_kept_;
}

void DiskCache::remember_failure(const std::string& why) {
  const std::lock_guard lock(mutex_);
  why_not_kept_ = why;
}

// A note is its text and, behind a line's end, the text's digest.
std::optional<std::string> DiskCache::find_note(const Sha256& key) {
  if (options_.folder.empty()) return std::nullopt;
  const auto bytes = read_whole_file(path_of(key, kNoteSuffix), kMaxNoteBytes);
  if (!bytes) return std::nullopt;
  const std::string_view content(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  const std::size_t end = content.rfind('\n');
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view text = content.substr(0, end);
  if (to_hex(sha256(std::as_bytes(std::span(text)))) != content.substr(end + 1))
    return std::nullopt;
  return std::string(text);
}

void DiskCache::store_note(const Sha256& key, const std::string& text) {
  if (options_.folder.empty()) return;
  const std::string content = text + "\n" + to_hex(sha256(std::as_bytes(std::span(text))));
  keep(path_of(key, kNoteSuffix), std::as_bytes(std::span(content)));
}

DiskCache::Options default_disk_cache() {
  DiskCache::Options options;
  if (const auto folder = cache_folder()) options.folder = (*folder / "kernels").string();
  if (const auto mib = read_environment().cache_max_mib) options.max_bytes = *mib << 20U;
  return options;
}

}  // namespace fovea::cuda::jit
