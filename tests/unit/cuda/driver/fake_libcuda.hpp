// A driver without a GPU: a shared library with the driver's names that remembers what it was asked.
// Tests open it by its path (kFakeLibcuda) and reach its memory by fake_state().
#pragma once

#include <string>
#include <vector>

#include "cuda/driver/types.hpp"
#include "unit/cuda/driver/fake_libraries.hpp"

namespace fovea::cuda::driver {

/// What was enqueued on a stream, or ordered by an event.
struct FakeStreamCall {
  std::string name;
  StreamHandle stream = nullptr;
  EventHandle event = nullptr;
  DevicePointer memory = 0;  // taken, given back, or read
  DevicePointer written = 0;
  std::size_t bytes = 0;  // taken
};

struct FakeState {
  int num_devices = 1;
  int major = 9, minor = 0;
  std::string architecture = "gfx942:sramecc+:xnack-";  // of AMD's
  std::string failing_call;                             // this function gives failing_result
  Result failing_result = kSuccess;
  int most_failures = -1;  // so often, then it succeeds; below 0: always

  bool is_capturing = false;               // every stream
  ContextHandle stream_context = nullptr;  // of every stream; null: the current one
  GreenContextHandle green_context =
      nullptr;  // the current one is of the device's primary one then
  DeviceHandle current_device = 0;
  int capture_mode = 0;             // of the thread
  std::vector<int> modes_of_loads;  // and of unloads

  std::vector<std::string> calls;  // since the last reset
  std::vector<ContextHandle> context_stack;
  RawLaunchConfig launch{};
  std::vector<LaunchAttribute> attributes;
  std::vector<bool> are_dependent;             // of every launch
  std::vector<unsigned char> first_parameter;  // first_parameter_bytes of it
  std::size_t first_parameter_bytes = 0;
  int max_dynamic_shared_bytes = 0;
  DevicePointer next_address = 0x10000;  // of what is allocated next
  bool has_memory = false;               // memory is the host's, and copies move bytes
  std::vector<FakeStreamCall> stream_calls;
  std::uintptr_t num_streams = 0, num_events = 0;
  std::vector<std::uint64_t> map_strides;

  void fail(const std::string& call, Result result, int times = -1) {
    failing_call = call;
    failing_result = result;
    most_failures = times;
  }
  int count(const std::string& call) const {
    int number = 0;
    for (const std::string& name : calls) number += name == call ? 1 : 0;
    return number;
  }
};

inline constexpr int kFakeHipSharedBytes = 64 << 10;
inline constexpr int kFakeHipWarpLanes = 64;

/// Opens kFakeLibcuda and gives it a fresh memory.
FakeState& fresh_fake();
/// The one in another file: kFakeProcessLibcuda, kFakeLibamdhip64.
FakeState& fresh_fake(const char* file);

inline constexpr int kFakeStaticSharedBytes = 48;
inline constexpr int kFakeSharedBytesPerCta = 232448;

}  // namespace fovea::cuda::driver
