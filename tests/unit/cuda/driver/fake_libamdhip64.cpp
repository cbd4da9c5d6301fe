// AMD's driver without a GPU: the fake of NVIDIA's by the names that HIP has for the same functions, and what HIP alone
// has. Functions that it has by NVIDIA's names only are never asked for.
#define cuInit hipInit
#define cuDriverGetVersion hipDriverGetVersion
#define cuGetErrorName hipDrvGetErrorName
#define cuGetErrorString hipDrvGetErrorString
#define cuDeviceGetCount hipGetDeviceCount
#define cuDeviceGet hipDeviceGet
#define cuModuleLoadDataEx hipModuleLoadDataEx
#define cuModuleUnload hipModuleUnload
#define cuModuleGetFunction hipModuleGetFunction
#define cuFuncGetAttribute hipFuncGetAttribute
#define cuOccupancyMaxActiveBlocksPerMultiprocessor \
  hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
#define cuStreamCreate hipStreamCreateWithFlags
#define cuStreamDestroy_v2 hipStreamDestroy
#define cuStreamSynchronize hipStreamSynchronize
#define cuStreamIsCapturing hipStreamIsCapturing
#define cuThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode
#define cuStreamBeginCapture_v2 hipStreamBeginCapture
#define cuStreamEndCapture hipStreamEndCapture
#define cuGraphInstantiateWithFlags hipGraphInstantiateWithFlags
#define cuGraphLaunch hipGraphLaunch
#define cuGraphExecDestroy hipGraphExecDestroy
#define cuGraphDestroy hipGraphDestroy
#define cuEventCreate hipEventCreateWithFlags
#define cuEventRecord hipEventRecord
#define cuEventQuery hipEventQuery
#define cuStreamWaitEvent hipStreamWaitEvent
#define cuEventSynchronize hipEventSynchronize
#define cuEventElapsedTime hipEventElapsedTime
#define cuEventDestroy_v2 hipEventDestroy
#define cuMemAlloc_v2 hipMalloc
#define cuMemFree_v2 hipFree
#define cuMemAllocAsync hipMallocAsync
#define cuMemFreeAsync hipFreeAsync
#define cuMemcpyHtoDAsync_v2 hipMemcpyHtoDAsync
#define cuMemcpyDtoHAsync_v2 hipMemcpyDtoHAsync
#define cuMemcpyDtoDAsync_v2 hipMemcpyDtoDAsync
#define cuMemsetD8Async hipMemsetD8Async
#define FOVEA_FAKE_VERSION 60241133  // of ROCm 6.2
#include "unit/cuda/driver/fake_libcuda.cpp"

FAKE(hipGetDevice, int* index) {
  *index = state.current_device;
  return called(__func__);
}
FAKE(hipSetDevice, int index) {
  const Lock lock(state_mutex);
  state.current_device = index;
  return called(__func__);
}
FAKE(hipGetDevicePropertiesR0600, HipProperties* properties, int) {
  const Lock lock(state_mutex);
  *properties = HipProperties{};
  properties->memory_bytes = std::size_t{192} << 30U;
  properties->shared_bytes_per_cta = kFakeHipSharedBytes;
  properties->shared_bytes_per_sm = kFakeHipSharedBytes;
  properties->warp_lanes = kFakeHipWarpLanes;
  properties->num_sms = 304;
  properties->l2_bytes = 4 << 20;
  std::strncpy(properties->name, "Fake MI300X", sizeof(properties->name) - 1);
  std::strncpy(properties->architecture, state.architecture.c_str(),
               sizeof(properties->architecture) - 1);
  return called(__func__);
}
FAKE(hipModuleLaunchKernel, FunctionHandle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
     StreamHandle stream, void** params, void**) {
  const Lock lock(state_mutex);
  state.launch = {.grid_x = grid_x,
                  .grid_y = grid_y,
                  .grid_z = grid_z,
                  .block_x = block_x,
                  .block_y = block_y,
                  .block_z = block_z,
                  .shared_bytes = shared_bytes,
                  .stream = stream,
                  .attributes = nullptr,
                  .num_attributes = 0};
  const auto* first = static_cast<const unsigned char*>(params[0]);
  state.first_parameter.assign(first, first + state.first_parameter_bytes);
  return enqueued({.name = __func__, .stream = stream});
}
