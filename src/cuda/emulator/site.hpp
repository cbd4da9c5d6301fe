// Where in the kernel's text an instruction stands. The emulated wrappers take it as a defaulted last argument.
#pragma once

namespace fovea::cuda::emulator {

/// std::source_location is missing with clang 14.
struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }

  bool operator==(const Site&) const = default;
};

}  // namespace fovea::cuda::emulator
