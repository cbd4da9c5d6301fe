#include "cuda/jit/trust.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace fovea::cuda::jit {
namespace {

/// Why others may have written what is open here; empty: only this user and root can have.
std::string why_untrusted(const struct stat& status) {
  if (status.st_uid != 0 && status.st_uid != ::geteuid()) {
    return fmt::format("belongs to user {}; expected user {} or root", status.st_uid, ::geteuid());
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fmt::format("has mode {:o}; expected that nobody but its owner may write",
                       status.st_mode & 07777U);
  }
  return "";
}

/// Looks at what `number` has opened, not at a path: the two may differ by the next moment.
TrustedFile examine(int number, mode_t form, const char* expected) {
  TrustedFile result{.file = Descriptor(number), .why_not = "", .is_missing = false};
  struct stat status {};
  if (number < 0 || ::fstat(number, &status) != 0) {
    result.is_missing = errno == ENOENT || errno == ENOTDIR;
    result.why_not = errno == ELOOP ? fmt::format("is a link; expected {}", expected)
                                    : std::generic_category().message(errno);
  } else if ((status.st_mode & S_IFMT) != form) {
    result.why_not = fmt::format("is something else than {}", expected);
  } else {
    result.why_not = why_untrusted(status);
  }
  if (!result.why_not.empty()) result.file = Descriptor();
  return result;
}

}  // namespace

Descriptor::~Descriptor() { close(); }

bool Descriptor::close() {
  const int number = std::exchange(number_, -1);
  return number < 0 || ::close(number) == 0;
}

TrustedFile open_trusted_folder(const std::string& path) {
  return examine(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), S_IFDIR, "a folder");
}

TrustedFile open_trusted_file(const Descriptor& folder, const std::string& name) {
  // O_NONBLOCK: a pipe of this name must not make us wait for its writer.
  constexpr int kFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  return examine(::openat(folder.get(), name.c_str(), kFlags), S_IFREG, "a regular file");
}

TrustedFile open_trusted_file(const std::string& path) {
  const std::filesystem::path parts(path);
  const std::string parent = parts.has_parent_path() ? parts.parent_path().string() : ".";
  TrustedFile folder = open_trusted_folder(parent);
  if (!folder.why_not.empty()) {
    if (!folder.is_missing) folder.why_not = fmt::format("its folder {}", folder.why_not);
    return folder;
  }
  return open_trusted_file(folder.file, parts.filename().string());
}

}  // namespace fovea::cuda::jit
