// The compiler of the compile tests: one for the process, or the reason why there is none.
#pragma once

#include <optional>
#include <string>

#include "cuda/jit/compiler.hpp"

namespace fovea::cuda {

inline jit::Compiler& compiler() {
  static jit::Compiler compiler;
  return compiler;
}

inline std::optional<std::string> why_no_compiler() {
  if (compiler().nvrtc().is_present()) return std::nullopt;
  return compiler().nvrtc().why_absent();
}

}  // namespace fovea::cuda
