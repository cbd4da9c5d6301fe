// "still here": a line on stderr while something takes longer than two seconds. Silent when stderr is no terminal.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace fovea::tools {

class Progress {
 public:
  /// `what` as in "fovea attend: computing".
  explicit Progress(std::string what);
  /// Wipes the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void set(std::string what);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null where nobody looks
};

/// "[#####---------------] 5/20"
std::string bar(std::size_t done, std::size_t total);

}  // namespace fovea::tools
