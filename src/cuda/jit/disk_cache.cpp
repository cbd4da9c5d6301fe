#include "cuda/jit/disk_cache.hpp"

#include <dirent.h>
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
#include "cuda/jit/trust.hpp"

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
  std::string name;
  std::int64_t bytes = 0;
  std::int64_t last_used = 0;  // nanoseconds since 1970
};

constexpr std::int64_t kSecond = 1'000'000'000;

/// Our regular files in an open folder.
std::vector<FoundFile> find_files(const Descriptor& folder) {
  std::vector<FoundFile> files;
  if (!folder.is_open()) return files;
  const int again = ::openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const entries = again < 0 ? nullptr : ::fdopendir(again);
  if (entries == nullptr) return files;
  while (const dirent* entry = ::readdir(entries)) {
    const std::string name = entry->d_name;
    struct stat status {};
    if (!is_ours(name) ||
        ::fstatat(folder.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(status.st_mode))
      continue;
    files.push_back({.name = name,
                     .bytes = status.st_size,
                     .last_used = status.st_mtim.tv_sec * kSecond + status.st_mtim.tv_nsec});
  }
  ::closedir(entries);
  return files;
}

std::int64_t now() { return ::time(nullptr) * kSecond; }

void mark_used(const Descriptor& file) { ::futimens(file.get(), nullptr); }

bool remove_file(const Descriptor& folder, const std::string& name) {
  return ::unlinkat(folder.get(), name.c_str(), 0) == 0;
}

std::string name_of(const Sha256& key, std::string_view suffix) {
  return fmt::format("{}{}", to_hex(key), suffix);
}

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

std::string DiskCache::why_unused() const {
  if (options_.folder.empty()) return "";
  const TrustedFile folder = open_trusted_folder(options_.folder);
  return folder.is_missing || folder.why_not.empty()
             ? ""
             : fmt::format("{} {}", options_.folder, folder.why_not);
}

std::optional<CacheEntry> DiskCache::find(const Sha256& key) {
  if (options_.folder.empty()) return std::nullopt;
  const TrustedFile folder = open_trusted_folder(options_.folder);
  if (!folder.file.is_open()) return std::nullopt;
  const std::string name = name_of(key, kEntrySuffix);
  const TrustedFile opened = open_trusted_file(folder.file, name);
  const auto bytes = read_whole_file(opened.file, kMaxEntryBytes);
  if (!bytes) return std::nullopt;
  ParsedEntry parsed = entry_from_bytes(*bytes, key);
  if (!parsed.why_bad.empty()) {
    // Where another process has just put a good one in its place, that one is lost: a compilation more.
    remove_file(folder.file, name);
    return std::nullopt;
  }
  mark_used(opened.file);
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
  const std::string name = name_of(key, kEntrySuffix);
  if (!keep(name, bytes)) return false;
  evict_all_but(name);
  return true;
}

bool DiskCache::keep(const std::string& name, std::span<const std::byte> bytes) {
  auto why = make_folder(options_.folder);
  if (!why) {
    const TrustedFile folder = open_trusted_folder(options_.folder);
    if (!folder.file.is_open()) {
      why = fmt::format("{} {}", options_.folder, folder.why_not);
    } else if (const auto failure = write_whole_file(folder.file, name, bytes)) {
      why = fmt::format("{}/{}", options_.folder, *failure);
    }
  }
  if (why) remember_failure(*why);
  return !why;
}

void DiskCache::evict_all_but(const std::string& kept) {
  const TrustedFile folder = open_trusted_folder(options_.folder);
  std::vector<FoundFile> files = find_files(folder.file);
  std::int64_t total = 0;
  const std::int64_t abandoned_before = now() - kAbandonedAfterSeconds * kSecond;
  std::erase_if(files, [&](const FoundFile& file) {
    const bool is_abandoned = is_written_aside(file.name) && file.last_used < abandoned_before;
    if (is_abandoned) remove_file(folder.file, file.name);
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
    if (file.name == kept) continue;  // times of the disk are too coarse to tell it from others
    if (remove_file(folder.file, file.name) || errno == ENOENT) total -= file.bytes;
  }
}

void DiskCache::remove(const Sha256& key) {
  if (options_.folder.empty()) return;
  const TrustedFile folder = open_trusted_folder(options_.folder);
  if (folder.file.is_open()) remove_file(folder.file, name_of(key, kEntrySuffix));
}

std::vector<DiskCache::Listed> DiskCache::list() const {
  std::vector<Listed> listed;
  if (options_.folder.empty()) return listed;
  const TrustedFile folder = open_trusted_folder(options_.folder);
  for (const FoundFile& file : find_files(folder.file)) {
    if (!has_form(file.name, kEntrySuffix)) continue;
    Listed row;
    row.file = file.name;
    row.bytes = file.bytes;
    row.last_used = file.last_used / kSecond;
    const TrustedFile opened = open_trusted_file(folder.file, file.name);
    if (const auto bytes = read_whole_file(opened.file, kMaxEntryBytes)) {
      ParsedEntry parsed = entry_from_bytes(*bytes, key_of(file.name));
      row.label = parsed.entry.label;
      row.architecture = parsed.entry.architecture;
      row.compiler = parsed.entry.compiler;
      row.why_bad = parsed.why_bad;
    } else {
      row.why_bad = opened.why_not.empty() ? "cannot be read" : opened.why_not;
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
  const TrustedFile folder = open_trusted_folder(options_.folder);
  for (const FoundFile& file : find_files(folder.file)) {
    if (!remove_file(folder.file, file.name)) continue;
    ++removed.files;
    removed.bytes += file.bytes;
  }
  return removed;
}

DiskCache::Removed DiskCache::remove_bad() {
  Removed removed;
  const TrustedFile folder = open_trusted_folder(options_.folder);
  for (const Listed& row : list()) {
    if (row.why_bad.empty() || !remove_file(folder.file, row.file)) continue;
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
  const TrustedFile folder = open_trusted_folder(options_.folder);
  if (!folder.file.is_open()) return std::nullopt;
  const TrustedFile note = open_trusted_file(folder.file, name_of(key, kNoteSuffix));
  const auto bytes = read_whole_file(note.file, kMaxNoteBytes);
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
  keep(name_of(key, kNoteSuffix), std::as_bytes(std::span(content)));
}

DiskCache::Options default_disk_cache() {
  DiskCache::Options options;
  if (const auto folder = cache_folder()) options.folder = (*folder / "kernels").string();
  if (const auto mib = read_environment().cache_max_mib) options.max_bytes = *mib << 20U;
  return options;
}

}  // namespace fovea::cuda::jit
