// Reading a file whole and writing it so that it appears whole or not at all.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/jit/trust.hpp"

namespace fovea::cuda::jit {

/// Empty where there is no regular file of at most max_bytes, or it cannot be read.
std::optional<std::vector<std::byte>> read_whole_file(const std::string& path,
                                                      std::size_t max_bytes);
std::optional<std::vector<std::byte>> read_whole_file(const Descriptor& file,
                                                      std::size_t max_bytes);

/// Writes beside `path`, then renames: whoever looks sees the old file or the new one. The reason
/// where it fails; nothing is left then. A process that is killed leaves a file that
/// is_written_aside() knows.
std::optional<std::string> write_whole_file(const std::string& path,
                                            std::span<const std::byte> bytes);
/// The same for a file of this name in an open folder.
std::optional<std::string> write_whole_file(const Descriptor& folder, const std::string& name,
                                            std::span<const std::byte> bytes);

/// Is this the name of a file that write_whole_file has not renamed yet?
bool is_written_aside(const std::string& name);

}  // namespace fovea::cuda::jit
