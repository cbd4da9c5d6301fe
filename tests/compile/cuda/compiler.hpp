// What the compile tests look at: kernels that a loader compiles, or the reason why there is no compiler. What was
// compiled from the same text by the same compiler is kept in a folder of the user's cache, as the library's own
// kernels are: most of what these tests take is the compiler's time.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/jit/loader.hpp"
#include "cuda/jit/places.hpp"
#include "support/long_run.hpp"

namespace fovea::cuda {

inline jit::Loader& loader() {
  static jit::Loader loader([] {
    jit::LoaderOptions options;
    options.pack = std::nullopt;
    const auto folder = jit::cache_folder();
    options.disk.folder = folder ? *folder / "compile_tests" : "";
    return options;
  }());
  return loader;
}

inline std::optional<std::string> why_no_compiler() {
  const jit::CompilerLibrary& library = loader().compiler().library();
  if (library.is_present()) return std::nullopt;
  return library.why_absent();
}

/// Compiled once for all tests: problems that differ in what a kernel of theirs does not see share its text.
inline const jit::Cubin& compiled(const jit::KernelText& text, jit::Architecture architecture) {
  static std::map<std::tuple<int, int, std::string>, jit::Cubin> cubins;
  const std::tuple key(architecture.major, architecture.minor, text.unit);
  const auto found = cubins.find(key);
  if (found != cubins.end()) return found->second;
  return cubins.emplace(key, loader().cubin(text, architecture)).first->second;
}

/// One text that several architectures run differs between them by ptxas alone, and compiling it for each took a
/// quarter of all that these tests take: a run compiles for the first of them, a long one (FOVEA_TEST_LONG) for all.
inline std::vector<jit::Architecture> of_this_run(std::initializer_list<jit::Architecture> all) {
  if (fovea::testing::times_longer() > 1) return all;
  return {*all.begin()};
}

}  // namespace fovea::cuda
