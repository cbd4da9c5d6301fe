// The few types of the drivers' binary interface that Fovea uses, declared by us so that no toolkit
// is needed to build. Read api.hpp next.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fovea::cuda::driver {

using Result = int;  // CUresult; 0 is success
inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;  // CUDA_ERROR_NOT_READY: not an error, of a query

using DeviceHandle = int;             // CUdevice
using DevicePointer = std::uint64_t;  // CUdeviceptr
using ContextHandle = struct ContextTag*;
using GreenContextHandle = struct GreenContextTag*;
using ModuleHandle = struct ModuleTag*;
using FunctionHandle = struct FunctionTag*;
using StreamHandle = struct StreamTag*;
using EventHandle = struct EventTag*;
using GraphHandle = struct GraphTag*;
using GraphExecHandle = struct GraphExecTag*;

/// CUlaunchAttribute: an id, padding to 8 bytes, 64 bytes of value.
struct LaunchAttribute {
  enum Id : int { cluster_dimension = 4, programmatic_stream_serialization = 6 };
  int id;
  int padding;
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int is_programmatic;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

/// CUlaunchConfig.
struct RawLaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

/// CUdevice_attribute, CUfunction_attribute: the ones that are asked for.
enum class DeviceAttribute : int {
  num_sms = 16,
  l2_bytes = 38,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  shared_bytes_per_sm = 81,
  registers_per_sm = 82,
  shared_bytes_per_cta_opt_in = 97,
};
enum class FunctionAttribute : int {
  max_threads_per_cta = 0,
  static_shared_bytes = 1,
  local_bytes = 3,
  num_registers = 4,
  max_dynamic_shared_bytes = 8,
  is_non_portable_cluster_allowed = 14,
};

/// hipDeviceProp_tR0600, the properties of a device since ROCm 6: members that are asked for, at their places, and room
/// for what later releases add.
struct HipProperties {
  char name[256];
  char before_memory[32];
  std::size_t memory_bytes;          // totalGlobalMem
  std::size_t shared_bytes_per_cta;  // sharedMemPerBlock
  int registers_per_cta;
  int warp_lanes;
  char before_num_sms[76];
  int num_sms;  // CUs: multiProcessorCount
  char before_l2[224];
  int l2_bytes;
  char before_shared[20];
  std::size_t shared_bytes_per_sm;  // sharedMemPerMultiprocessor
  int registers_per_sm;
  char before_architecture[508];
  char architecture[256];  // gcnArchName, "gfx942:sramecc+:xnack-"
  char after[2680];
};
static_assert(offsetof(HipProperties, memory_bytes) == 288 &&
              offsetof(HipProperties, warp_lanes) == 308 &&
              offsetof(HipProperties, num_sms) == 388 && offsetof(HipProperties, l2_bytes) == 616 &&
              offsetof(HipProperties, shared_bytes_per_sm) == 640 &&
              offsetof(HipProperties, architecture) == 1160 && sizeof(HipProperties) == 4096);

/// CUtensorMap.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

}  // namespace fovea::cuda::driver
