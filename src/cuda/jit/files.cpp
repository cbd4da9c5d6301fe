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
#include <utility>

namespace fovea::cuda::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kAsidePrefix = ".writing-";

std::string words_of(int error) { return std::generic_category().message(error); }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return descriptor_; }
  /// Network file systems tell of a full disk as late as here.
  bool close() { return ::close(std::exchange(descriptor_, -1)) == 0; }

 private:
  int descriptor_;
};

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
std::string name_aside(const fs::path& path) {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32U) | random();
  const std::string name = fmt::format("{}{:016x}", kAsidePrefix, number);
  return (path.parent_path() / name).string();
}

}  // namespace

std::optional<std::vector<std::byte>> read_whole_file(const std::string& path,
                                                      std::size_t max_bytes) {
  // O_NONBLOCK: a pipe of this name must not make us wait for its writer.
  const File file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (static_cast<std::uint64_t>(status.st_size) > max_bytes) return {};
  std::vector<std::byte> bytes(static_cast<std::size_t>(status.st_size));
  if (!read_all(file.get(), bytes)) return {};
  return bytes;
}

std::optional<std::string> write_whole_file(const std::string& path,
                                            std::span<const std::byte> bytes) {
  if (exceeds_file_size_limit(bytes.size()))
    return fmt::format("{}: {} bytes are above the limit of file sizes", path, bytes.size());
  const std::string aside = name_aside(path);
  File file(::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) return fmt::format("{}: {}", aside, words_of(errno));
  // Note: no fsync, which costs milliseconds. Readers check what they read, so a file that a power
  // failure tore is as good as none.
  const bool is_written = write_all(file.get(), bytes) && file.close();
  if (is_written && ::rename(aside.c_str(), path.c_str()) == 0) return std::nullopt;
  const std::string why = fmt::format("{}: {}", path, words_of(errno));
  ::unlink(aside.c_str());
  return why;
}

bool is_written_aside(const std::string& name) { return name.starts_with(kAsidePrefix); }

}  // namespace fovea::cuda::jit
