// Files in and out. What a command writes is checked before it works, written aside and renamed: a killed run leaves
// the old file or the new one.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "array.hpp"
#include "npy.hpp"

namespace fovea::tools {

/// Throws Failure(kBadInput) with the system's reason. `option` starts the message.
std::shared_ptr<const Buffer> read_file(std::string_view option, const std::string& path);

/// A .npy file given to `option`.
Array read_npy(std::string_view option, const std::string& path, Uint16 uint16);

/// The files of one run.
class OutputFiles {
 public:
  /// What `option` will write. Throws Failure(kBadInput) where it cannot be written.
  void add(std::string_view option, const std::string& path);
  /// What the run reads, so that no output replaces it.
  void add_input(std::string_view option, const std::string& path);
  /// Call once all are added: two outputs of one name, or an output that is an input, are refused.
  void refuse_clashes() const;

  struct Content {
    std::string path;
    std::string header;
    std::vector<std::span<const std::byte>> parts;  // follow the header
  };
  /// Writes all aside, then renames all. Throws Failure(kFailed); then no old file has changed unless a rename itself
  /// failed.
  static void write(const std::vector<Content>& contents);

 private:
  struct Named {
    std::string option;
    std::string path;
    std::filesystem::path target;  // links resolved
  };
  std::vector<Named> outputs_, inputs_;
};

/// Text as the bytes of a Content part.
std::span<const std::byte> as_part(std::string_view text);

}  // namespace fovea::tools
