#include "files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "failure.hpp"

namespace fovea::tools {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 20U;

std::string reason(int error) { return std::strerror(error); }

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close_now(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }
  bool close_now() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

/// A pipe has no size: read until it ends.
Buffer read_pipe(int fd, std::string_view option, const std::string& path) {
  std::string bytes;
  for (;;) {
    const std::size_t used = bytes.size();
    bytes.resize(used + kReadBytes);
    const ssize_t count = ::read(fd, bytes.data() + used, kReadBytes);
    if (count < 0) bad_input(fmt::format("{}: cannot read {}: {}", option, path, reason(errno)));
    bytes.resize(used + static_cast<std::size_t>(count));
    if (count == 0) break;
  }
  Buffer buffer = Buffer::uninitialized(bytes.size());
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
  return buffer;
}

Buffer read_regular(int fd, std::size_t size, std::string_view option, const std::string& path) {
  Buffer buffer = Buffer::uninitialized(size);
  std::size_t used = 0;
  while (used < size) {
    const ssize_t count = ::read(fd, buffer.data() + used, size - used);
    if (count < 0) bad_input(fmt::format("{}: cannot read {}: {}", option, path, reason(errno)));
    if (count == 0) bad_input(fmt::format("{}: {} became shorter while it was read", option, path));
    used += static_cast<std::size_t>(count);
  }
  return buffer;
}

/// A file beside its target that vanishes unless it is renamed.
class AsideFile {
 public:
  explicit AsideFile(std::filesystem::path target) : target_(std::move(target)) {
    path_ =
        (target_.parent_path() / fmt::format(".{}.XXXXXX", target_.filename().string())).string();
    fd_ = ::mkstemp(path_.data());
    if (fd_ < 0) path_.clear();
  }
  ~AsideFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  AsideFile(AsideFile&& other) noexcept
      : target_(std::move(other.target_)),
        path_(std::exchange(other.path_, {})),
        fd_(std::exchange(other.fd_, -1)) {}
  AsideFile& operator=(AsideFile&&) = delete;

  bool is_open() const { return fd_ >= 0; }

  bool write(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
    return true;
  }

  /// mkstemp makes private files: the result gets the old file's mode, or what a new file gets.
  bool finish() {
    struct stat old {};
    const mode_t mask = ::umask(0);
    ::umask(mask);
    const bool exists = ::stat(target_.c_str(), &old) == 0;
    const mode_t mode = exists ? old.st_mode & 07777U : 0666U & ~mask;
    if (::fchmod(fd_, mode) != 0 || ::fsync(fd_) != 0) return false;
    return ::close(std::exchange(fd_, -1)) == 0;
  }

  bool rename() {
    if (::rename(path_.c_str(), target_.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::filesystem::path target_;
  std::string path_;
  int fd_ = -1;
};

/// Absolute, without links and dots, even where the file is still to come.
std::filesystem::path resolved(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  std::filesystem::path result = std::filesystem::weakly_canonical(absolute, error);
  return error ? absolute : result;
}

bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code error;
  return a == b || std::filesystem::equivalent(a, b, error);
}

/// Data survive a power cut only once the folder's entry does.
void sync_folder(const std::filesystem::path& target) {
  const Descriptor folder(::open(target.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) ::fsync(folder.get());
}

}  // namespace

std::shared_ptr<const Buffer> read_file(std::string_view option, const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    bad_input(fmt::format("{}: cannot read {}: {}", option, path, reason(errno)));
  }
  if (S_ISREG(status.st_mode)) {
    return std::make_shared<const Buffer>(
        read_regular(file.get(), static_cast<std::size_t>(status.st_size), option, path));
  }
  if (!S_ISFIFO(status.st_mode)) {
    bad_input(fmt::format("{}: {} is {}; expected a file", option, path,
                          S_ISDIR(status.st_mode) ? "a folder" : "a device"));
  }
  return std::make_shared<const Buffer>(read_pipe(file.get(), option, path));
}

Array read_npy(std::string_view option, const std::string& path, Uint16 uint16) {
  const std::string source = fmt::format("{}: {}", option, path);
  Array array = parse_npy(read_file(option, path), source, uint16);
  array.source = source;
  return array;
}

void OutputFiles::add(std::string_view option, const std::string& path) {
  const auto refuse = [&](std::string_view why) {
    bad_input(fmt::format("{}: cannot write {}: {}", option, path, why));
  };
  if (path.empty()) refuse("the name is empty");
  std::filesystem::path target = resolved(path);
  struct stat status {};
  if (::stat(target.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) refuse("it is a folder");
    if (!S_ISREG(status.st_mode)) refuse("it is not a regular file");
    if (::access(target.c_str(), W_OK) != 0) refuse(reason(errno));
  } else if (path.back() == '/') {
    refuse("it names a folder");
  }
  if (!AsideFile(target).is_open()) refuse(reason(errno));
  outputs_.push_back({std::string(option), path, std::move(target)});
}

void OutputFiles::add_input(std::string_view option, const std::string& path) {
  inputs_.push_back({std::string(option), path, resolved(path)});
}

void OutputFiles::refuse_clashes() const {
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (is_same_file(outputs_[i].target, outputs_[j].target)) {
        bad_input(fmt::format("{}: {} is also what {} writes; expected two files",
                              outputs_[i].option, outputs_[i].path, outputs_[j].option));
      }
    }
    for (const Named& input : inputs_) {
      if (is_same_file(outputs_[i].target, input.target)) {
        bad_input(fmt::format("{}: {} is also what {} reads; expected another file",
                              outputs_[i].option, outputs_[i].path, input.option));
      }
    }
  }
}

void OutputFiles::write(const std::vector<Content>& contents) {
  const auto failed = [](const std::string& path) {
    throw Failure(kFailed, fmt::format("cannot write {}: {}", path, reason(errno)));
  };
  std::vector<AsideFile> files;
  for (const Content& content : contents) {
    AsideFile& file = files.emplace_back(resolved(content.path));
    bool is_written = file.is_open() && file.write(as_part(content.header));
    for (const auto& part : content.parts) is_written = is_written && file.write(part);
    if (!is_written || !file.finish()) failed(content.path);
  }
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (!files[i].rename()) failed(contents[i].path);
    sync_folder(resolved(contents[i].path));
  }
}

std::span<const std::byte> as_part(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace fovea::tools
