// The driver's functions as a table of pointers, and their names in NVIDIA's and AMD's. Meanings: CUDA driver API
// manual; HIP's, AMD's, are the same but where a row below has no name for it. Read driver.hpp next.
#pragma once

#include <cstddef>

#include "cuda/driver/types.hpp"

namespace fovea::cuda::driver {

/// One row for each function: member, symbol in libcuda, in libamdhip64 ("": it has none, and the member is null),
/// arguments. All return Result. HIP has no contexts but devices, launches without attributes, and tells what a device
/// is in one struct.
// clang-format off
#define FOVEA_DRIVER_FUNCTIONS(X)                                                                                     \
  X(init, "cuInit", "hipInit", (unsigned flags))                                                                      \
  X(driver_version, "cuDriverGetVersion", "hipDriverGetVersion", (int* version))                                      \
  X(error_name, "cuGetErrorName", "hipDrvGetErrorName", (Result error, const char** name))                            \
  X(error_string, "cuGetErrorString", "hipDrvGetErrorString", (Result error, const char** words))                     \
  X(device_count, "cuDeviceGetCount", "hipGetDeviceCount", (int* count))                                              \
  X(device_get, "cuDeviceGet", "hipDeviceGet", (DeviceHandle* device, int index))                                     \
  X(device_name, "cuDeviceGetName", "", (char* name, int bytes, DeviceHandle device))                                 \
  X(device_memory, "cuDeviceTotalMem_v2", "", (std::size_t* bytes, DeviceHandle device))                              \
  X(device_attribute, "cuDeviceGetAttribute", "", (int* value, DeviceAttribute attribute, DeviceHandle device))       \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", "", (ContextHandle* context, DeviceHandle device))            \
  X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", "", (DeviceHandle device))                               \
  X(context_get_current, "cuCtxGetCurrent", "", (ContextHandle* context))                                             \
  X(context_push, "cuCtxPushCurrent_v2", "", (ContextHandle context))                                                 \
  X(context_pop, "cuCtxPopCurrent_v2", "", (ContextHandle* context))                                                  \
  X(context_device, "cuCtxGetDevice", "", (DeviceHandle* device))                                                     \
  X(module_load, "cuModuleLoadDataEx", "hipModuleLoadDataEx",                                                         \
    (ModuleHandle* module, const void* image, unsigned num_options, int* options, void** values))                     \
  X(module_unload, "cuModuleUnload", "hipModuleUnload", (ModuleHandle module))                                        \
  X(module_function, "cuModuleGetFunction", "hipModuleGetFunction",                                                   \
    (FunctionHandle* function, ModuleHandle module, const char* name))                                                \
  X(function_attribute, "cuFuncGetAttribute", "hipFuncGetAttribute",                                                  \
    (int* value, FunctionAttribute attribute, FunctionHandle function))                                               \
  X(function_set_attribute, "cuFuncSetAttribute", "",                                                                 \
    (FunctionHandle function, FunctionAttribute attribute, int value))                                                \
  X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",   \
    (int* num_ctas, FunctionHandle function, int num_threads, std::size_t dynamic_shared_bytes))                      \
  X(launch, "cuLaunchKernelEx", "",                                                                                   \
    (const RawLaunchConfig* config, FunctionHandle function, void** params, void** extra))                            \
  X(stream_create, "cuStreamCreate", "hipStreamCreateWithFlags", (StreamHandle* stream, unsigned flags))              \
  X(stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy", (StreamHandle stream))                                  \
  X(stream_synchronize, "cuStreamSynchronize", "hipStreamSynchronize", (StreamHandle stream))                         \
  X(stream_is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing", (StreamHandle stream, int* status))           \
  X(stream_context, "cuStreamGetCtx", "", (StreamHandle stream, ContextHandle* context))                              \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", (int* mode))    \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", "hipStreamBeginCapture", (StreamHandle stream, int mode))        \
  X(stream_end_capture, "cuStreamEndCapture", "hipStreamEndCapture", (StreamHandle stream, GraphHandle* graph))       \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags",                                 \
    (GraphExecHandle* exec, GraphHandle graph, unsigned long long flags))                                             \
  X(graph_launch, "cuGraphLaunch", "hipGraphLaunch", (GraphExecHandle exec, StreamHandle stream))                     \
  X(graph_exec_destroy, "cuGraphExecDestroy", "hipGraphExecDestroy", (GraphExecHandle exec))                          \
  X(graph_destroy, "cuGraphDestroy", "hipGraphDestroy", (GraphHandle graph))                                          \
  X(event_create, "cuEventCreate", "hipEventCreateWithFlags", (EventHandle* event, unsigned flags))                   \
  X(event_record, "cuEventRecord", "hipEventRecord", (EventHandle event, StreamHandle stream))                        \
  X(event_query, "cuEventQuery", "hipEventQuery", (EventHandle event))                                                \
  X(stream_wait_event, "cuStreamWaitEvent", "hipStreamWaitEvent",                                                     \
    (StreamHandle stream, EventHandle event, unsigned flags))                                                         \
  X(event_synchronize, "cuEventSynchronize", "hipEventSynchronize", (EventHandle event))                              \
  X(event_elapsed, "cuEventElapsedTime", "hipEventElapsedTime",                                                       \
    (float* milliseconds, EventHandle start, EventHandle end))                                                        \
  X(event_destroy, "cuEventDestroy_v2", "hipEventDestroy", (EventHandle event))                                       \
  X(memory_allocate, "cuMemAlloc_v2", "hipMalloc", (DevicePointer* pointer, std::size_t bytes))                       \
  X(memory_free, "cuMemFree_v2", "hipFree", (DevicePointer pointer))                                                  \
  X(memory_allocate_async, "cuMemAllocAsync", "hipMallocAsync",                                                       \
    (DevicePointer* pointer, std::size_t bytes, StreamHandle stream))                                                 \
  X(memory_free_async, "cuMemFreeAsync", "hipFreeAsync", (DevicePointer pointer, StreamHandle stream))                \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync",                                                     \
    (DevicePointer to, const void* from, std::size_t bytes, StreamHandle stream))                                     \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync",                                                       \
    (void* to, DevicePointer from, std::size_t bytes, StreamHandle stream))                                           \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync",                                                     \
    (DevicePointer to, DevicePointer from, std::size_t bytes, StreamHandle stream))                                   \
  X(set_bytes, "cuMemsetD8Async", "hipMemsetD8Async",                                                                 \
    (DevicePointer to, unsigned char value, std::size_t bytes, StreamHandle stream))                                  \
  X(launch_plain, "", "hipModuleLaunchKernel",                                                                        \
    (FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,  \
     unsigned block_z, unsigned shared_bytes, StreamHandle stream, void** params, void** extra))                      \
  X(current_device, "", "hipGetDevice", (int* index))                                                                 \
  X(set_device, "", "hipSetDevice", (int index))                                                                      \
  X(properties, "", "hipGetDevicePropertiesR0600", (HipProperties* properties, int index))

/// Newer than the oldest driver that can run anything of ours: null where the driver lacks them.
#define FOVEA_DRIVER_OPTIONAL_FUNCTIONS(X)                                                                            \
  X(stream_contexts, "cuStreamGetCtx_v2", "",                                                                         \
    (StreamHandle stream, ContextHandle* context, GreenContextHandle* green))                                         \
  X(encode_tiled, "cuTensorMapEncodeTiled", "",                                                                       \
    (TensorMap* map, int data_type, std::uint32_t rank, void* address, const std::uint64_t* shape,                    \
     const std::uint64_t* stride_bytes, const std::uint32_t* box, const std::uint32_t* element_strides,               \
     int interleave, int swizzle, int l2_promotion, int out_of_bounds_fill))
// clang-format on

struct Api {
#define FOVEA_DRIVER_MEMBER(member, cuda, hip, arguments) Result(*member) arguments = nullptr;
  FOVEA_DRIVER_FUNCTIONS(FOVEA_DRIVER_MEMBER)
  FOVEA_DRIVER_OPTIONAL_FUNCTIONS(FOVEA_DRIVER_MEMBER)
#undef FOVEA_DRIVER_MEMBER
};

}  // namespace fovea::cuda::driver
