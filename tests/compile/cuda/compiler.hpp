// The compiler of the compile tests: one for the process, or the reason why there is none.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/jit/compiler.hpp"
#include "support/long_run.hpp"

namespace fovea::cuda {

inline jit::Compiler& compiler() {
  static jit::Compiler compiler;
  return compiler;
}

inline std::optional<std::string> why_no_compiler() {
  if (compiler().library().is_present()) return std::nullopt;
  return compiler().library().why_absent();
}

/// Compiled once for all tests: problems that differ in what a kernel of theirs does not see share its text.
inline const jit::Cubin& compiled(const jit::KernelText& text, jit::Architecture architecture) {
  static std::map<std::tuple<int, int, std::string>, jit::Cubin> cubins;
  const std::tuple key(architecture.major, architecture.minor, text.unit);
  const auto found = cubins.find(key);
  if (found != cubins.end()) return found->second;
  return cubins.emplace(key, compiler().compile(text, architecture)).first->second;
}

/// One text that several architectures run differs between them by ptxas alone, and compiling it for each took a
/// quarter of all that these tests take: a run compiles for the first of them, a long one (FOVEA_TEST_LONG) for all.
inline std::vector<jit::Architecture> of_this_run(std::initializer_list<jit::Architecture> all) {
  if (fovea::testing::times_longer() > 1) return all;
  return {*all.begin()};
}

}  // namespace fovea::cuda
