// A compiler for AMD's GPUs that makes code objects without code, and ends the process, as old ones do, when it is
// asked for a target that its clang does not know.
#include "unit/cuda/jit/fake_libhiprtc.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>

#include "unit/cuda/jit/made_code_object.hpp"

using fovea::cuda::jit::FakeHiprtcState;

namespace {

FakeHiprtcState state;
std::mutex mutex;

struct Program {
  std::string text, log, image;
};

/// Of LLVM's release notes.
int first_clang_of(std::string_view target) {
  if (target == "gfx90a") return 13;
  if (target == "gfx942") return 17;
  if (target == "gfx1100") return 17;
  if (target == "gfx1201") return 18;
  return 20;
}

}  // namespace

#define FAKE(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)

constexpr int kSuccess = 0, kCompilationError = 6;

FAKE(FakeHiprtcState*, fake_hiprtc_state) { return &state; }

FAKE(int, hiprtcVersion, int* major, int* minor) {
  *major = 9, *minor = 0;
  return kSuccess;
}
FAKE(const char*, hiprtcGetErrorString, int) { return "HIPRTC_ERROR_FAKE"; }
FAKE(int, hiprtcCreateProgram, Program** program, const char* text, const char*, int num_headers,
     const char* const*, const char* const* names) {
  const std::lock_guard lock(mutex);
  *program = new Program{.text = text, .log = {}, .image = {}};
  if (num_headers > 0) state.headers.assign(names, names + num_headers);
  return kSuccess;
}
FAKE(int, hiprtcDestroyProgram, Program** program) {
  delete *program;
  return kSuccess;
}
FAKE(int, hiprtcCompileProgram, Program* program, int num_options, const char* const* options) {
  const std::lock_guard lock(mutex);
  std::string joined;
  for (const std::string& option : std::vector<std::string>(options, options + num_options)) {
    constexpr std::string_view kTarget = "--offload-arch=";
    if (option.starts_with(kTarget) && first_clang_of(option.substr(kTarget.size())) > state.clang)
      std::abort();
    joined += option + " ";
  }
  state.options.push_back(joined);
  if (program->text.find("__clang_version__") != std::string::npos) {
    program->log = "unit.hip:1:9: warning: fovea: clang " + std::to_string(state.clang) +
                   ".0.0git (of a test) [-W#pragma-messages]\n";
    return kCompilationError;
  }
  program->log = state.failure;
  program->image = fovea::cuda::jit::code_object();
  return state.failure.empty() ? kSuccess : kCompilationError;
}
FAKE(int, hiprtcGetCodeSize, Program* program, std::size_t* bytes) {
  *bytes = program->image.size();
  return kSuccess;
}
FAKE(int, hiprtcGetCode, Program* program, char* image) {
  std::memcpy(image, program->image.data(), program->image.size());
  return kSuccess;
}
FAKE(int, hiprtcGetProgramLogSize, Program* program, std::size_t* bytes) {
  *bytes = program->log.size() + 1;
  return kSuccess;
}
FAKE(int, hiprtcGetProgramLog, Program* program, char* text) {
  std::memcpy(text, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}
