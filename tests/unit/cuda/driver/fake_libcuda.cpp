// The fake itself: see fake_libcuda.hpp.
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

FAKE(cuInit, unsigned) { return called("cuInit"); }
FAKE(cuDriverGetVersion, int* version) {
  *version = 13000;
  return called("cuDriverGetVersion");
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
  return called("cuDeviceGetCount");
}
FAKE(cuDeviceGet, DeviceHandle* device, int index) {
  *device = index;
  return called("cuDeviceGet");
}
FAKE(cuDeviceGetName, char* name, int bytes, DeviceHandle) {
  std::strncpy(name, "Fake H200", static_cast<std::size_t>(bytes));
  return called("cuDeviceGetName");
}
FAKE(cuDeviceTotalMem_v2, std::size_t* bytes, DeviceHandle) {
  *bytes = std::size_t{141} << 30U;
  return called("cuDeviceTotalMem_v2");
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
  return called("cuDeviceGetAttribute");
}
FAKE(cuDevicePrimaryCtxRetain, ContextHandle* context, DeviceHandle device) {
  *context = handle<ContextHandle>(0x100U + static_cast<unsigned>(device));
  return called("cuDevicePrimaryCtxRetain");
}
FAKE(cuDevicePrimaryCtxRelease_v2, DeviceHandle) { return called("cuDevicePrimaryCtxRelease_v2"); }
FAKE(cuCtxGetCurrent, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.context_stack.empty() ? nullptr : state.context_stack.back();
  return called("cuCtxGetCurrent");
}
FAKE(cuCtxPushCurrent_v2, ContextHandle context) {
  const Lock lock(state_mutex);
  state.context_stack.push_back(context);
  return called("cuCtxPushCurrent_v2");
}
FAKE(cuCtxPopCurrent_v2, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.context_stack.back();
  state.context_stack.pop_back();
  return called("cuCtxPopCurrent_v2");
}
FAKE(cuCtxGetDevice, DeviceHandle* device) {
  *device = state.current_device;
  return called("cuCtxGetDevice");
}
FAKE(cuModuleLoadDataEx, ModuleHandle* module, const void*, unsigned, int*, void**) {
  const Lock lock(state_mutex);
  *module = handle<ModuleHandle>(0x200);
  state.modes_of_loads.push_back(state.capture_mode);
  return called("cuModuleLoadDataEx");
}
FAKE(cuModuleUnload, ModuleHandle) {
  const Lock lock(state_mutex);
  state.modes_of_loads.push_back(state.capture_mode);
  return called("cuModuleUnload");
}
FAKE(cuModuleGetFunction, FunctionHandle* function, ModuleHandle, const char*) {
  *function = handle<FunctionHandle>(0x300);
  return called("cuModuleGetFunction");
}
FAKE(cuFuncGetAttribute, int* value, FunctionAttribute attribute, FunctionHandle) {
  *value = attribute == FunctionAttribute::static_shared_bytes ? kFakeStaticSharedBytes : 128;
  return called("cuFuncGetAttribute");
}
FAKE(cuFuncSetAttribute, FunctionHandle, FunctionAttribute attribute, int value) {
  const Lock lock(state_mutex);
  if (attribute == FunctionAttribute::max_dynamic_shared_bytes)
    state.max_dynamic_shared_bytes = value;
  return called("cuFuncSetAttribute");
}
FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* num_ctas, FunctionHandle, int, std::size_t) {
  *num_ctas = 2;
  return called("cuOccupancyMaxActiveBlocksPerMultiprocessor");
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
  return enqueued({.name = "cuLaunchKernelEx", .stream = config->stream});
}
FAKE(cuStreamCreate, StreamHandle* stream, unsigned) {
  const Lock lock(state_mutex);
  *stream = handle<StreamHandle>(0x400 + 8 * state.num_streams++);
  return called("cuStreamCreate");
}
FAKE(cuStreamDestroy_v2, StreamHandle) { return called("cuStreamDestroy_v2"); }
FAKE(cuStreamSynchronize, StreamHandle) { return called("cuStreamSynchronize"); }
FAKE(cuStreamIsCapturing, StreamHandle, int* status) {
  *status = state.is_capturing ? 1 : 0;
  return called("cuStreamIsCapturing");
}
FAKE(cuStreamGetCtx, StreamHandle, ContextHandle* context) {
  const Lock lock(state_mutex);
  *context = state.stream_context != nullptr ? state.stream_context : state.context_stack.back();
  return called("cuStreamGetCtx");
}
FAKE(cuStreamGetCtx_v2, StreamHandle, ContextHandle* context, GreenContextHandle* green) {
  const Lock lock(state_mutex);
  *green = state.green_context;
  *context = *green != nullptr ? handle<ContextHandle>(0x100U) : state.context_stack.back();
  return called("cuStreamGetCtx_v2");
}
FAKE(cuThreadExchangeStreamCaptureMode, int* mode) {
  const Lock lock(state_mutex);
  std::swap(*mode, state.capture_mode);
  return called("cuThreadExchangeStreamCaptureMode");
}
FAKE(cuStreamBeginCapture_v2, StreamHandle, int) { return called("cuStreamBeginCapture_v2"); }
FAKE(cuStreamEndCapture, StreamHandle, GraphHandle* graph) {
  *graph = handle<GraphHandle>(0x500);
  return called("cuStreamEndCapture");
}
FAKE(cuGraphInstantiateWithFlags, GraphExecHandle* exec, GraphHandle, unsigned long long) {
  *exec = handle<GraphExecHandle>(0x600);
  return called("cuGraphInstantiateWithFlags");
}
FAKE(cuGraphLaunch, GraphExecHandle, StreamHandle) { return called("cuGraphLaunch"); }
FAKE(cuGraphExecDestroy, GraphExecHandle) { return called("cuGraphExecDestroy"); }
FAKE(cuGraphDestroy, GraphHandle) { return called("cuGraphDestroy"); }
FAKE(cuEventCreate, EventHandle* event, unsigned) {
  const Lock lock(state_mutex);
  *event = handle<EventHandle>(0x70000 + 8 * state.num_events++);
  return called("cuEventCreate");
}
FAKE(cuEventRecord, EventHandle event, StreamHandle stream) {
  return enqueued({.name = "cuEventRecord", .stream = stream, .event = event});
}
FAKE(cuEventQuery, EventHandle) { return called("cuEventQuery"); }
FAKE(cuStreamWaitEvent, StreamHandle stream, EventHandle event, unsigned) {
  return enqueued({.name = "cuStreamWaitEvent", .stream = stream, .event = event});
}
FAKE(cuEventSynchronize, EventHandle) { return called("cuEventSynchronize"); }
FAKE(cuEventElapsedTime, float* milliseconds, EventHandle, EventHandle) {
  *milliseconds = 1;
  return called("cuEventElapsedTime");
}
FAKE(cuEventDestroy_v2, EventHandle) { return called("cuEventDestroy_v2"); }
FAKE(cuMemAlloc_v2, DevicePointer* pointer, std::size_t bytes) {
  *pointer = taken(bytes);
  return called("cuMemAlloc_v2");
}
FAKE(cuMemFree_v2, DevicePointer pointer) {
  give_back(pointer);
  return called("cuMemFree_v2");
}
FAKE(cuMemAllocAsync, DevicePointer* pointer, std::size_t bytes, StreamHandle stream) {
  *pointer = taken(bytes);
  return enqueued({.name = "cuMemAllocAsync", .stream = stream, .memory = *pointer});
}
FAKE(cuMemFreeAsync, DevicePointer pointer, StreamHandle stream) {
  give_back(pointer);
  return enqueued({.name = "cuMemFreeAsync", .stream = stream, .memory = pointer});
}
FAKE(cuMemcpyHtoDAsync_v2, DevicePointer to, const void* from, std::size_t bytes, StreamHandle) {
  move_bytes(to, from, bytes);
  return called("cuMemcpyHtoDAsync_v2");
}
FAKE(cuMemcpyDtoHAsync_v2, void* to, DevicePointer from, std::size_t bytes, StreamHandle) {
  move_bytes(to, from, bytes);
  return called("cuMemcpyDtoHAsync_v2");
}
FAKE(cuMemcpyDtoDAsync_v2, DevicePointer, DevicePointer, std::size_t, StreamHandle) {
  return called("cuMemcpyDtoDAsync_v2");
}
FAKE(cuMemsetD8Async, DevicePointer, unsigned char, std::size_t, StreamHandle) {
  return called("cuMemsetD8Async");
}
FAKE(cuTensorMapEncodeTiled, TensorMap*, int, std::uint32_t rank, void*, const std::uint64_t*,
     const std::uint64_t* strides, const std::uint32_t*, const std::uint32_t*, int, int, int, int) {
  state.map_strides.assign(strides, strides + rank - 1);
  return called("cuTensorMapEncodeTiled");
}
