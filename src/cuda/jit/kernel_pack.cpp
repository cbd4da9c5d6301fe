#include "cuda/jit/kernel_pack.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <unordered_set>

#include "core/check.hpp"
#include "core/env.hpp"
#include "cuda/jit/bytes.hpp"
#include "cuda/jit/files.hpp"
#include "cuda/jit/places.hpp"

namespace fovea::cuda::jit {
namespace {

// mark, format, bytes of the index, its digest; the index, behind it the tuning if there is one; the entries.
constexpr std::string_view kMark = "fovea kernel pack";
constexpr std::uint64_t kFormat = 1;
constexpr std::size_t kHeadBytes = 8 + kMark.size() + 8 + 8 + sizeof(Sha256);
constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{64} << 20U;

bool read_at(int file, std::uint64_t offset, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::pread(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

std::uint64_t size_of(int file) {
  struct stat status {};
  return ::fstat(file, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

}  // namespace

void write_pack(const std::string& path, std::span<const PackItem> items, std::string_view tuning) {
  ByteWriter index, entries;
  std::unordered_set<Sha256, Sha256Hash> keys;
  index.put_number(items.size());
  for (const PackItem& item : items) {
    if (!keys.insert(item.key).second)
      invalid("write_pack", fmt::format("two items have the key {}", to_hex(item.key)));
    const std::vector<std::byte> bytes = entry_to_bytes(item.key, item.entry);
    index.put_digest(item.key);
    index.put_number(entries.bytes().size());
    index.put_number(bytes.size());
    index.put_text(item.entry.label);
    index.put_text(item.entry.architecture);
    index.put_text(item.entry.compiler);
    entries.put_bytes(bytes);
  }
  if (!tuning.empty()) index.put_text(tuning);
  ByteWriter file;
  file.put_text(kMark);
  file.put_number(kFormat);
  file.put_number(index.bytes().size());
  file.put_digest(sha256(index.bytes()));
  file.put_bytes(index.bytes());
  file.put_bytes(entries.bytes());
  if (const auto why = write_whole_file(path, file.bytes())) invalid("write_pack", *why);
}

KernelPack::KernelPack(const std::string& path) : path_(path) {
  TrustedFile opened = open_trusted_file(path);
  file_ = std::move(opened.file);
  const std::string why = opened.why_not.empty() ? read_index() : opened.why_not;
  if (!why.empty()) invalid("kernel pack", fmt::format("{}: {}", path, why));
}

std::string KernelPack::read_index() {
  const std::uint64_t file_bytes = size_of(file_.get());
  std::vector<std::byte> head(kHeadBytes);
  if (!read_at(file_.get(), 0, head)) return "is no kernel pack";
  ByteReader reader(head);
  if (reader.get_text() != kMark) return "is no kernel pack";
  if (const std::uint64_t format = reader.get_number(); format != kFormat)
    return fmt::format("has format {}; expected {}", format, kFormat);
  const std::uint64_t index_bytes = reader.get_number();
  const Sha256 checksum = reader.get_digest();
  if (index_bytes > std::min(kMaxIndexBytes, file_bytes - kHeadBytes)) return "is cut off";
  std::vector<std::byte> bytes(static_cast<std::size_t>(index_bytes));
  if (!read_at(file_.get(), kHeadBytes, bytes)) return "is cut off";
  if (sha256(bytes) != checksum) return "has an index that does not pass its checksum";

  ByteReader index(bytes);
  const std::uint64_t begin = kHeadBytes + index_bytes;
  const std::uint64_t count = index.get_number();
  for (std::uint64_t i = 0; i < count && index.is_whole(); ++i) {
    const Sha256 key = index.get_digest();
    Place& place = index_[key];
    place.offset = begin + index.get_number();
    place.bytes = index.get_number();
    place.label = index.get_text();
    place.architecture = index.get_text();
    place.compiler = index.get_text();
    if (place.offset > file_bytes || place.bytes > file_bytes - place.offset) return "is cut off";
  }
  if (!index.rest().empty()) tuning_ = index.get_text();
  return index.is_whole() ? "" : "has an index that is not whole";
}

std::optional<CacheEntry> KernelPack::find(const Sha256& key) const {
  const auto found = index_.find(key);
  if (found == index_.end()) return std::nullopt;
  std::vector<std::byte> bytes(static_cast<std::size_t>(found->second.bytes));
  if (!read_at(file_.get(), found->second.offset, bytes)) return std::nullopt;
  ParsedEntry parsed = entry_from_bytes(bytes, key);
  if (!parsed.why_bad.empty()) return std::nullopt;
  return std::move(parsed.entry);
}

std::vector<KernelPack::Listed> KernelPack::list() const {
  std::vector<Listed> rows;
  for (const auto& [key, place] : index_) {
    rows.push_back({.key = key,
                    .label = place.label,
                    .architecture = place.architecture,
                    .compiler = place.compiler,
                    .bytes = static_cast<std::int64_t>(place.bytes)});
  }
  std::sort(rows.begin(), rows.end(), [](const Listed& a, const Listed& b) {
    return std::tie(a.architecture, a.label, a.key) < std::tie(b.architecture, b.label, b.key);
  });
  return rows;
}

std::optional<std::string> default_pack_path() {
  if (auto named = read_environment().pack) return named;
  std::vector<std::filesystem::path> files{library_folder() / "fovea.pack"};
  for (const std::filesystem::path& site : python_sites())
    files.push_back(site / "fovea_kernels" / "fovea.pack");
  for (const std::filesystem::path& file : files) {
    std::error_code error;
    if (std::filesystem::is_regular_file(file, error)) return file.string();
  }
  return std::nullopt;
}

}  // namespace fovea::cuda::jit
