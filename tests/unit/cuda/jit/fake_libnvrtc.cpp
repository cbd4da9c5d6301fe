// A compiler of which a test knows when it compiles: a shared library with NVRTC's names, whose compilations wait for
// each other. What it makes is no code; the fake driver takes it.
#include "unit/cuda/jit/fake_libnvrtc.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <string>

using fovea::cuda::jit::FakeNvrtcState;

namespace {

FakeNvrtcState state;
std::mutex mutex;
std::condition_variable changed;
std::string held;  // words of texts whose compilations wait; empty: none does

/// Until as many are under way at once as the test expects, or for so long that they never will be.
void meet() {
  std::unique_lock lock(mutex);
  state.most_at_once = std::max(state.most_at_once, ++state.num_under_way);
  changed.notify_all();
  changed.wait_for(lock, std::chrono::milliseconds(state.longest_wait_ms),
                   [] { return state.most_at_once >= state.num_expected; });
  --state.num_under_way;
}

struct Program {
  std::string text;
  bool has_headers = false;  // the unit that asks for the compiler's version has none
  int (*callback)(void*, void*) = nullptr;
  void* payload = nullptr;

  bool is_cancelled() const { return callback != nullptr && callback(payload, nullptr) == 1; }
};

/// False where its caller wants no end of it.
bool wait_while_held(const Program& program) {
  std::unique_lock lock(mutex);
  while (!held.empty() && program.text.find(held) != std::string::npos) {
    if (program.is_cancelled()) return false;
    changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

#define FAKE(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)

constexpr int kSuccess = 0, kCompilationError = 6, kCancelled = 16;

FAKE(FakeNvrtcState*, fake_nvrtc_state) { return &state; }

FAKE(void, fake_nvrtc_hold, const char* words) {
  const std::lock_guard lock(mutex);
  held = words == nullptr ? "" : words;
  changed.notify_all();
}

FAKE(int, nvrtcSetFlowCallback, Program* program, int (*callback)(void*, void*), void* payload) {
  program->callback = callback;
  program->payload = payload;
  return kSuccess;
}
FAKE(int, nvrtcVersion, int* major, int* minor) {
  *major = 13, *minor = 0;
  return kSuccess;
}
FAKE(const char*, nvrtcGetErrorString, int) { return "NVRTC_ERROR_FAKE"; }
FAKE(int, nvrtcGetNumSupportedArchs, int* count) {
  *count = 2;
  return kSuccess;
}
FAKE(int, nvrtcGetSupportedArchs, int* numbers) {
  numbers[0] = 75;
  numbers[1] = 90;
  return kSuccess;
}
FAKE(int, nvrtcCreateProgram, Program** program, const char* text, const char*, int num_headers,
     const char* const*, const char* const*) {
  *program = new Program{.text = text, .has_headers = num_headers > 0};
  return kSuccess;
}
FAKE(int, nvrtcDestroyProgram, Program** program) {
  delete *program;
  return kSuccess;
}
FAKE(int, nvrtcCompileProgram, Program* program, int, const char* const*) {
  if (program->has_headers) meet();
  if (!wait_while_held(*program)) return kCancelled;
  return program->text.find("#error") == std::string::npos ? kSuccess : kCompilationError;
}

/// Every text that it can be asked for is the program's own.
#define FAKE_TEXT(size_name, text_name)                                 \
  FAKE(int, size_name, Program* program, std::size_t* bytes) {          \
    *bytes = program->text.size() + 1;                                  \
    return kSuccess;                                                    \
  }                                                                     \
  FAKE(int, text_name, Program* program, char* text) {                  \
    std::memcpy(text, program->text.c_str(), program->text.size() + 1); \
    return kSuccess;                                                    \
  }
FAKE_TEXT(nvrtcGetPTXSize, nvrtcGetPTX)
FAKE_TEXT(nvrtcGetCUBINSize, nvrtcGetCUBIN)
FAKE_TEXT(nvrtcGetProgramLogSize, nvrtcGetProgramLog)
