// Names in the text of kernels that are compiled for the host.
#pragma once

#include <cstddef>
#include <string>

namespace fovea::testing {

/// The programs of every case stand in one namespace: with another name in the place of each `from`.
inline std::string renamed(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

}  // namespace fovea::testing
