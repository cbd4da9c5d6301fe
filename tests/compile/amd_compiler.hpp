// Device text through scripts/compile_amd, which needs no GPU: what came of it.
#pragma once

#include <sys/wait.h>

#include <cstddef>
#include <cstdlib>
#include <span>
#include <string>

#include "cuda/jit/code_object.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {

struct CompiledForAmd {
  bool has_compiler = true;  // else nothing else is filled
  std::string words;         // of the compiler
  std::string listing;       // assembly; empty where it does not compile
  std::string image;         // what HIP loads
  jit::CodeObject object;    // what its note says
};

/// FOVEA_COMPILE_AMD is the script. `target` as in "gfx942".
inline CompiledForAmd compile_for_amd(const std::string& unit, const std::string& target) {
  constexpr int kNoCompiler = 3;
  const jit::TemporaryFolder folder;
  const std::string text = folder / "unit.hip", image = folder / "image", words = folder / "words";
  jit::write_text(text, unit);
  const std::string command = std::string(FOVEA_COMPILE_AMD) + " " + text + " " + target + " " +
                              image + " >" + words + " 2>&1";
  const int result = WEXITSTATUS(std::system(command.c_str()));
  CompiledForAmd compiled{.has_compiler = result != kNoCompiler,
                          .words = jit::read_text(words),
                          .listing = {},
                          .image = {},
                          .object = {}};
  if (result != 0) return compiled;
  compiled.listing = jit::read_text(image + ".s");
  compiled.image = jit::read_text(image);
  compiled.object = jit::read_code_object(std::as_bytes(std::span(compiled.image)));
  return compiled;
}

#define FOVEA_SKIP_WITHOUT_AMD_COMPILER(compiled) \
  if (!(compiled).has_compiler) GTEST_SKIP() << "needs ziglang: scripts/dev setup"

}  // namespace fovea::cuda
