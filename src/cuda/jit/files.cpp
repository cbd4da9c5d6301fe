#include "cuda/jit/files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <random>
#include <system_error>

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAsidePrefix = ".writing-";

std::string words_of(int error) { return std::generic_category().message(error); }

bool write_all(int descriptor, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

bool read_all(int descriptor, std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::read(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

/// A write beyond this limit would end the process by a signal, so it is asked for first.
bool exceeds_file_size_limit(std::size_t bytes) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         bytes > limit.rlim_cur;
}

/// Unique among machines that share a folder: process ids are not.
std::string name_aside() {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  return fmt::format("{}{:016x}", kAsidePrefix, number);
}

/// `aside` and `path` are relative to `folder`, or AT_FDCWD's.
std::optional<std::string> write_beside(int folder, const std::string& aside,
                                        const std::string& path, std::span<const std::byte> bytes) {
  if (exceeds_file_size_limit(bytes.size()))
    return fmt::format("{}: {} bytes are above the limit of file sizes", path, bytes.size());
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  Descriptor file(::openat(folder, aside.c_str(), kFlags, 0644));
  if (!file.is_open()) return fmt::format("{}: {}", path, words_of(errno));
  // Note: no fsync, which costs milliseconds. Readers check what they read, so a file that a power
  // failure tore is as good as none.
  const bool is_written = write_all(file.get(), bytes) && file.close();
  if (is_written && ::renameat(folder, aside.c_str(), folder, path.c_str()) == 0)
    return std::nullopt;
  const std::string why = fmt::format("{}: {}", path, words_of(errno));
  ::unlinkat(folder, aside.c_str(), 0);
  return why;
}

}  // namespace

std::optional<std::vector<std::byte>> read_whole_file(const Descriptor& file,
                                                      std::size_t max_bytes) {
  struct stat status {};
  if (!file.is_open() || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (static_cast<std::uint64_t>(status.st_size) > max_bytes) return {};
  std::vector<std::byte> bytes(static_cast<std::size_t>(status.st_size));
  if (!read_all(file.get(), bytes)) return {};
  return bytes;
}

std::optional<std::vector<std::byte>> read_whole_file(const std::string& path,
                                                      std::size_t max_bytes) {
  // O_NONBLOCK: a pipe of this name must not make us wait for its writer.
  return read_whole_file(Descriptor(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)),
                         max_bytes);
}

std::optional<std::string> write_whole_file(const std::string& path,
                                            std::span<const std::byte> bytes) {
  return write_beside(AT_FDCWD, (fs::path(path).parent_path() / name_aside()).string(), path,
                      bytes);
}

std::optional<std::string> write_whole_file(const Descriptor& folder, const std::string& name,
                                            std::span<const std::byte> bytes) {
  return write_beside(folder.get(), name_aside(), name, bytes);
}

bool is_written_aside(const std::string& name) { return name.starts_with(kAsidePrefix); }

}  // namespace fovea::cuda::jit
