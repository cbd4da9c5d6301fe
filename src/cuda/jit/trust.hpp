// Cubins run in the user's process, so files of them are read only where no other user can have written them. Read
// files.hpp for the reading itself.
#pragma once

#include <string>
#include <utility>

namespace fovea::cuda::jit {

/// An open file or folder, closed with its scope.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  int get() const { return number_; }
  bool is_open() const { return number_ >= 0; }
  /// Network file systems tell of a full disk as late as here.
  bool close();

 private:
  int number_ = -1;
};

/// What was opened, or why it is not used.
struct TrustedFile {
  Descriptor file;
  std::string why_not;      // empty: opened
  bool is_missing = false;  // there is nothing of this name
};

/// The folder at `path`, for reading: it belongs to this user or to root, and nobody else may write in it. Links on the
/// way to it are followed: what counts is the folder that was opened.
TrustedFile open_trusted_folder(const std::string& path);

/// A regular file in an open folder, for reading, under the same conditions. A link in its place is refused.
TrustedFile open_trusted_file(const Descriptor& folder, const std::string& name);

/// Both: the file at `path` in the folder that `path` says.
TrustedFile open_trusted_file(const std::string& path);

}  // namespace fovea::cuda::jit
