// The driver's functions as a table of pointers, and their names. Meanings: CUDA driver API manual.
// Read driver.hpp next.
#pragma once

#include <cstddef>

#include "cuda/driver/types.hpp"

namespace fovea::cuda::driver {

/// One row for each function: member, exported symbol, arguments. All return Result.
// clang-format off
#define FOVEA_DRIVER_FUNCTIONS(X)                                                                                 \
  X(init, "cuInit", (unsigned flags))                                                                             \
  X(driver_version, "cuDriverGetVersion", (int* version))                                                         \
  X(error_name, "cuGetErrorName", (Result error, const char** name))                                              \
  X(error_string, "cuGetErrorString", (Result error, const char** words))                                         \
  X(device_count, "cuDeviceGetCount", (int* count))                                                               \
  X(device_get, "cuDeviceGet", (DeviceHandle* device, int index))                                                 \
  X(device_name, "cuDeviceGetName", (char* name, int bytes, DeviceHandle device))                                 \
  X(device_memory, "cuDeviceTotalMem_v2", (std::size_t* bytes, DeviceHandle device))                              \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, DeviceAttribute attribute, DeviceHandle device))       \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", (ContextHandle* context, DeviceHandle device))            \
  X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceHandle device))                               \
  X(context_get_current, "cuCtxGetCurrent", (ContextHandle* context))                                             \
  X(context_push, "cuCtxPushCurrent_v2", (ContextHandle context))                                                 \
  X(context_pop, "cuCtxPopCurrent_v2", (ContextHandle* context))                                                  \
  X(context_device, "cuCtxGetDevice", (DeviceHandle* device))                                                     \
  X(module_load, "cuModuleLoadDataEx",                                                                            \
    (ModuleHandle* module, const void* image, unsigned num_options, int* options, void** values))                 \
  X(module_unload, "cuModuleUnload", (ModuleHandle module))                                                       \
  X(module_function, "cuModuleGetFunction", (FunctionHandle* function, ModuleHandle module, const char* name))    \
  X(function_attribute, "cuFuncGetAttribute", (int* value, FunctionAttribute attribute, FunctionHandle function)) \
  X(function_set_attribute, "cuFuncSetAttribute", (FunctionHandle function, FunctionAttribute attribute, int value)) \
  X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                                                     \
    (int* num_ctas, FunctionHandle function, int num_threads, std::size_t dynamic_shared_bytes))                  \
  X(launch, "cuLaunchKernelEx",                                                                                   \
    (const RawLaunchConfig* config, FunctionHandle function, void** params, void** extra))                        \
  X(stream_create, "cuStreamCreate", (StreamHandle* stream, unsigned flags))                                      \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle stream))                                                  \
  X(stream_synchronize, "cuStreamSynchronize", (StreamHandle stream))                                             \
  X(stream_is_capturing, "cuStreamIsCapturing", (StreamHandle stream, int* status))                               \
  X(stream_context, "cuStreamGetCtx", (StreamHandle stream, ContextHandle* context))                              \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int* mode))                                      \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (StreamHandle stream, int mode))                             \
  X(stream_end_capture, "cuStreamEndCapture", (StreamHandle stream, GraphHandle* graph))                          \
  X(graph_instantiate, "cuGraphInstantiateWithFlags",                                                             \
    (GraphExecHandle* exec, GraphHandle graph, unsigned long long flags))                                         \
  X(graph_launch, "cuGraphLaunch", (GraphExecHandle exec, StreamHandle stream))                                   \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExecHandle exec))                                             \
  X(graph_destroy, "cuGraphDestroy", (GraphHandle graph))                                                         \
  X(event_create, "cuEventCreate", (EventHandle* event, unsigned flags))                                          \
  X(event_record, "cuEventRecord", (EventHandle event, StreamHandle stream))                                      \
  X(event_query, "cuEventQuery", (EventHandle event))                                                             \
  X(stream_wait_event, "cuStreamWaitEvent", (StreamHandle stream, EventHandle event, unsigned flags))             \
  X(event_synchronize, "cuEventSynchronize", (EventHandle event))                                                 \
  X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, EventHandle start, EventHandle end))               \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle event))                                                      \
  X(memory_allocate, "cuMemAlloc_v2", (DevicePointer* pointer, std::size_t bytes))                                \
  X(memory_free, "cuMemFree_v2", (DevicePointer pointer))                                                         \
  X(memory_allocate_async, "cuMemAllocAsync",                                                                     \
    (DevicePointer* pointer, std::size_t bytes, StreamHandle stream))                                             \
  X(memory_free_async, "cuMemFreeAsync", (DevicePointer pointer, StreamHandle stream))                            \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                                                       \
    (DevicePointer to, const void* from, std::size_t bytes, StreamHandle stream))                                 \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2",                                                                         \
    (void* to, DevicePointer from, std::size_t bytes, StreamHandle stream))                                       \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2",                                                                       \
    (DevicePointer to, DevicePointer from, std::size_t bytes, StreamHandle stream))                               \
  X(set_bytes, "cuMemsetD8Async", (DevicePointer to, unsigned char value, std::size_t bytes, StreamHandle stream))

/// Newer than the oldest driver that can run anything of ours: null where the driver lacks them.
#define FOVEA_DRIVER_OPTIONAL_FUNCTIONS(X)                                                                        \
  X(stream_contexts, "cuStreamGetCtx_v2",                                                                         \
    (StreamHandle stream, ContextHandle* context, GreenContextHandle* green))                                     \
  X(encode_tiled, "cuTensorMapEncodeTiled",                                                                       \
    (TensorMap* map, int data_type, std::uint32_t rank, void* address, const std::uint64_t* shape,                \
     const std::uint64_t* stride_bytes, const std::uint32_t* box, const std::uint32_t* element_strides,           \
     int interleave, int swizzle, int l2_promotion, int out_of_bounds_fill))
// clang-format on

struct Api {
#define FOVEA_DRIVER_MEMBER(member, symbol, arguments) Result(*member) arguments = nullptr;
  FOVEA_DRIVER_FUNCTIONS(FOVEA_DRIVER_MEMBER)
  FOVEA_DRIVER_OPTIONAL_FUNCTIONS(FOVEA_DRIVER_MEMBER)
#undef FOVEA_DRIVER_MEMBER
};

}  // namespace fovea::cuda::driver
