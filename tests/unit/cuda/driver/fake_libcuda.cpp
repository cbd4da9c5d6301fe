// The fake itself: see fake_libcuda.hpp. fake_libamdhip64.cpp is the same by other names.
#include "unit/cuda/driver/fake_libcuda.hpp"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

using namespace fovea::cuda::driver;

namespace {

FakeState state;

/// Kernels are loaded by several threads. A function that holds it asks `called`, which takes it too.
std::recursive_mutex state_mutex;

using Lock = std::lock_guard<std::recursive_mutex>;

/// No test asks so much; of a process that never does, the memory shall not grow (bench/micro/plan_run_bench.cpp).
constexpr std::size_t kMostRemembered = 4096;

Result called(const char* name) {
  const Lock lock(state_mutex);
  if (state.calls.size() == kMostRemembered) {
    state.calls.clear();
    state.are_dependent.clear();
  }
  state.calls.emplace_back(name);
  if (state.failing_call != name || state.most_failures == 0) return kSuccess;
  if (state.most_failures > 0) --state.most_failures;
  return state.failing_result;
}

template <class Handle>
Handle handle(std::uintptr_t number) {
  return reinterpret_cast<Handle>(number);
}

Result enqueued(FakeStreamCall call) {
  const Lock lock(state_mutex);
  const Result result = called(call.name.c_str());
  if (state.stream_calls.size() == kMostRemembered) state.stream_calls.clear();
  state.stream_calls.push_back(std::move(call));
  return result;
}

/// Addresses that nobody else has; unless a test asks for memory there is none behind them.
DevicePointer taken(std::size_t bytes) {
  const Lock lock(state_mutex);
  if (state.has_memory) return reinterpret_cast<DevicePointer>(std::malloc(bytes + 1));
  constexpr std::size_t kAlignment = 512;
  return std::exchange(state.next_address,
                       state.next_address + (bytes + kAlignment) / kAlignment * kAlignment);
}

void give_back(DevicePointer memory) {
  if (state.has_memory) std::free(reinterpret_cast<void*>(memory));
}

template <class To, class From>
void move_bytes(To to, From from, std::size_t bytes) {
  if (state.has_memory && bytes != 0)
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

}  // namespace

#define FAKE(name, ...) extern "C" __attribute__((visibility("default"))) Result name(__VA_ARGS__)

extern "C" __attribute__((visibility("default"))) FakeState* fake_state() { return &state; }
/// For the fakes of other libraries: what they enqueue stands in the same list.
extern "C" __attribute__((visibility("default"))) void fake_enqueue(const FakeStreamCall& call) {
  enqueued(call);
}

#ifndef FOVEA_FAKE_VERSION
#define FOVEA_FAKE_VERSION 13000
#endif

FAKE(cuInit, unsigned) { return called(__func__); }
FAKE(cuDriverGetVersion, int* version) {
  *version = FOVEA_FAKE_VERSION;
  return called(__func__);
}
/// Of NVRTC's, where it finds the fake as the process' libcuda.so.1: there is no such table.
FAKE(cuGetExportTable, const void**, const void*) {
  constexpr Result kNotFound = 500;
  return kNotFound;
}
FAKE(cuGetErrorName, Result, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return kSuccess;
}
FAKE(cuGetErrorString, Result, const char** words) {
  *words = "as the test asked";
  return kSuccess;
}
FAKE(cuDeviceGetCount, int* count) {
  *count = state.num_devices;
  return called(__func__);
}
FAKE(cuDeviceGet, DeviceHandle* device, int index) {
  *device = index;
  return called(__func__);
}
FAKE(cuDeviceGetName, char* name, int bytes, DeviceHandle) {
  std::strncpy(name, "Fake H200", static_cast<std::size_t>(bytes));
  return called(__func__);
}
FAKE(cuDeviceTotalMem_v2, std::size_t* bytes, DeviceHandle) {
  *bytes = std::size_t{141} << 30U;
  return called(__func__);
}
FAKE(cuDeviceGetAttribute, int* value, DeviceAttribute attribute, DeviceHandle) {
  switch (attribute) {
    case DeviceAttribute::num_sms:
      *value = 132;
      break;
    case DeviceAttribute::l2_bytes:
      *value = 60 << 20;
      break;
    case DeviceAttribute::compute_capability_major:
      *value = state.major;
      break;
    case DeviceAttribute::compute_capability_minor:
      *value = state.minor;
      break;
    case DeviceAttribute::shared_bytes_per_sm:
      *value = 233472;
      break;
    case DeviceAttribute::registers_per_sm:
      *value = 65536;
      break;
    case DeviceAttribute::shared_bytes_per_cta_opt_in:
      *value = kFakeSharedBytesPerCta;
      break;
  }
  return called(__func__);
}
FAKE(cuDevicePrimaryCtxRetain, ContextHandle* context, DeviceHandle device) {
  *context = handle<ContextHandle>(0x100U + static_cast<unsigned>(device));
  return called(__func__);
}
FAKE(cuDevicePrimaryCtxRelease_v2, DeviceHandle) { return called(__func__); }
FAKE(cuCtxGetCurrent, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.context_stack.empty() ? nullptr : state.context_stack.back();
  return called(__func__);
}
FAKE(cuCtxPushCurrent_v2, ContextHandle context) {
  const Lock lock(state_mutex);
  state.context_stack.push_back(context);
  return called(__func__);
}
FAKE(cuCtxPopCurrent_v2, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.context_stack.back();
  state.context_stack.pop_back();
  return called(__func__);
}
FAKE(cuCtxGetDevice, DeviceHandle* device) {
  *device = state.current_device;
  return called(__func__);
}
FAKE(cuModuleLoadDataEx, ModuleHandle* module, const void*, unsigned, int*, void**) {
  const Lock lock(state_mutex);
  *module = handle<ModuleHandle>(0x200);
  state.modes_of_loads.push_back(state.capture_mode);
  return called(__func__);
}
FAKE(cuModuleUnload, ModuleHandle) {
  const Lock lock(state_mutex);
  state.modes_of_loads.push_back(state.capture_mode);
  return called(__func__);
}
FAKE(cuModuleGetFunction, FunctionHandle* function, ModuleHandle, const char*) {
  *function = handle<FunctionHandle>(0x300);
  return called(__func__);
}
FAKE(cuFuncGetAttribute, int* value, FunctionAttribute attribute, FunctionHandle) {
  *value = attribute == FunctionAttribute::static_shared_bytes ? kFakeStaticSharedBytes : 128;
  return called(__func__);
}
FAKE(cuFuncSetAttribute, FunctionHandle, FunctionAttribute attribute, int value) {
  const Lock lock(state_mutex);
  if (attribute == FunctionAttribute::max_dynamic_shared_bytes)
    state.max_dynamic_shared_bytes = value;
  return called(__func__);
}
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* num_ctas, FunctionHandle, int, std::size_t) {
  *num_ctas = 2;
  return called(__func__);
}
FAKE(cuLaunchKernelEx, const RawLaunchConfig* config, FunctionHandle, void** params, void**) {
  const Lock lock(state_mutex);
  state.launch = *config;
  state.attributes.assign(config->attributes, config->attributes + config->num_attributes);
  state.are_dependent.push_back(false);
  for (const LaunchAttribute& attribute : state.attributes) {
    if (attribute.id == LaunchAttribute::programmatic_stream_serialization)
      state.are_dependent.back() = attribute.value.is_programmatic != 0;
  }
  const auto* first = static_cast<const unsigned char*>(params[0]);
  state.first_parameter.assign(first, first + state.first_parameter_bytes);
  return enqueued({.name = __func__, .stream = config->stream});
}
FAKE(cuStreamCreate, StreamHandle* stream, unsigned) {
  const Lock lock(state_mutex);
  *stream = handle<StreamHandle>(0x400 + 8 * state.num_streams++);
  return called(__func__);
}
FAKE(cuStreamDestroy_v2, StreamHandle) { return called(__func__); }
FAKE(cuStreamSynchronize, StreamHandle) { return called(__func__); }
FAKE(cuStreamIsCapturing, StreamHandle, int* status) {
  *status = state.is_capturing ? 1 : 0;
  return called(__func__);
}
FAKE(cuStreamGetCtx, StreamHandle, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.stream_context != nullptr ? state.stream_context : state.context_stack.back();
  return called(__func__);
}
FAKE(cuStreamGetCtx_v2, StreamHandle, ContextHandle* context, GreenContextHandle* green) {
  const Lock lock(state_mutex);
  *green = state.green_context;
  *context = *green != nullptr ? handle<ContextHandle>(0x100U) : state.context_stack.back();
  return called(__func__);
}
FAKE(cuThreadExchangeStreamCaptureMode, int* mode) {
  const Lock lock(state_mutex);
  std::swap(*mode, state.capture_mode);
  return called(__func__);
}
FAKE(cuStreamBeginCapture_v2, StreamHandle, int) { return called(__func__); }
FAKE(cuStreamEndCapture, StreamHandle, GraphHandle* graph) {
  *graph = handle<GraphHandle>(0x500);
  return called(__func__);
}
FAKE(cuGraphInstantiateWithFlags, GraphExecHandle* exec, GraphHandle, unsigned long long) {
  *exec = handle<GraphExecHandle>(0x600);
  return called(__func__);
}
FAKE(cuGraphLaunch, GraphExecHandle, StreamHandle) { return called(__func__); }
FAKE(cuGraphExecDestroy, GraphExecHandle) { return called(__func__); }
FAKE(cuGraphDestroy, GraphHandle) { return called(__func__); }
FAKE(cuEventCreate, EventHandle* event, unsigned) {
  const Lock lock(state_mutex);
  *event = handle<EventHandle>(0x70000 + 8 * state.num_events++);
  return called(__func__);
}
FAKE(cuEventRecord, EventHandle event, StreamHandle stream) {
  return enqueued({.name = __func__, .stream = stream, .event = event});
}
FAKE(cuEventQuery, EventHandle) { return called(__func__); }
FAKE(cuStreamWaitEvent, StreamHandle stream, EventHandle event, unsigned) {
  return enqueued({.name = __func__, .stream = stream, .event = event});
}
FAKE(cuEventSynchronize, EventHandle) { return called(__func__); }
FAKE(cuEventElapsedTime, float* milliseconds, EventHandle, EventHandle) {
  *milliseconds = 1;
  return called(__func__);
}
FAKE(cuEventDestroy_v2, EventHandle) { return called(__func__); }
FAKE(cuMemAlloc_v2, DevicePointer* pointer, std::size_t bytes) {
  *pointer = taken(bytes);
  return called(__func__);
}
FAKE(cuMemFree_v2, DevicePointer pointer) {
  give_back(pointer);
  return called(__func__);
}
FAKE(cuMemAllocAsync, DevicePointer* pointer, std::size_t bytes, StreamHandle stream) {
  *pointer = taken(bytes);
  return enqueued({.name = __func__, .stream = stream, .memory = *pointer, .bytes = bytes});
}
FAKE(cuMemFreeAsync, DevicePointer pointer, StreamHandle stream) {
  give_back(pointer);
  return enqueued({.name = __func__, .stream = stream, .memory = pointer});
}
FAKE(cuMemcpyHtoDAsync_v2, DevicePointer to, const void* from, std::size_t bytes, StreamHandle) {
  move_bytes(to, from, bytes);
  return called(__func__);
}
FAKE(cuMemcpyDtoHAsync_v2, void* to, DevicePointer from, std::size_t bytes, StreamHandle) {
  move_bytes(to, from, bytes);
  return called(__func__);
}
FAKE(cuMemcpyDtoDAsync_v2, DevicePointer, DevicePointer, std::size_t, StreamHandle) {
  return called(__func__);
}
FAKE(cuMemsetD8Async, DevicePointer, unsigned char, std::size_t, StreamHandle) {
  return called(__func__);
}
FAKE(cuTensorMapEncodeTiled, TensorMap*, int, std::uint32_t rank, void*, const std::uint64_t*,
     const std::uint64_t* strides, const std::uint32_t*, const std::uint32_t*, int, int, int, int) {
  state.map_strides.assign(strides, strides + rank - 1);
  return called(__func__);
}
