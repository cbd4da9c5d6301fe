// The AMD twin of src/cuda/device/ptx/base.cuh: the same names by builtins of LLVM's AMDGPU target, for CDNA (64 lanes
// a warp) and RDNA (32). A folder ahead of src/cuda/device on the include path brings these files in its place. What is
// written there of each function holds here; comments say what differs. There is no asm here or in kernels: the
// compiler does not know what hazards of the machine stand in it.
#pragma once

#include "shared/types.h"

// hipRTC knows these words by itself; plain clang has the attributes alone. What a kernel is given is constant on AMD.
#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(threads, ...)                    \
  __attribute__((amdgpu_flat_work_group_size(1, threads))) \
  __VA_OPT__(__attribute__((amdgpu_waves_per_eu(__VA_ARGS__))))
#endif
#define __grid_constant__

#define FOVEA_DEVICE static __device__ __forceinline__
#define FOVEA_DEVICE_MEMBER __device__ __forceinline__
#define FOVEA_DEVICE_CALL static __device__ __noinline__

namespace fovea::cuda::ptx {

/// An address in local data share (LDS), which is what others call shared memory.
using SharedAddress = std::uint32_t;

struct Index3 {
  std::int32_t x, y, z;
};

#if defined(__GFX9__)
inline constexpr std::int32_t kWarpLanes = 64;
using LaneMask = std::uint64_t;
#else
inline constexpr std::int32_t kWarpLanes = 32;
using LaneMask = std::uint32_t;
#endif

template <class To, class From>
FOVEA_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits move between types of one size");
  return __builtin_bit_cast(To, from);
}

FOVEA_DEVICE Index3 thread_idx() {
  return {static_cast<std::int32_t>(__builtin_amdgcn_workitem_id_x()),
          static_cast<std::int32_t>(__builtin_amdgcn_workitem_id_y()),
          static_cast<std::int32_t>(__builtin_amdgcn_workitem_id_z())};
}

FOVEA_DEVICE Index3 block_idx() {
  return {static_cast<std::int32_t>(__builtin_amdgcn_workgroup_id_x()),
          static_cast<std::int32_t>(__builtin_amdgcn_workgroup_id_y()),
          static_cast<std::int32_t>(__builtin_amdgcn_workgroup_id_z())};
}

FOVEA_DEVICE Index3 block_dim() {
  return {static_cast<std::int32_t>(__builtin_amdgcn_workgroup_size_x()),
          static_cast<std::int32_t>(__builtin_amdgcn_workgroup_size_y()),
          static_cast<std::int32_t>(__builtin_amdgcn_workgroup_size_z())};
}

/// Grids are counted in threads there.
FOVEA_DEVICE Index3 grid_dim() {
  const Index3 block = block_dim();
  return {static_cast<std::int32_t>(__builtin_amdgcn_grid_size_x()) / block.x,
          static_cast<std::int32_t>(__builtin_amdgcn_grid_size_y()) / block.y,
          static_cast<std::int32_t>(__builtin_amdgcn_grid_size_z()) / block.z};
}

/// v_mbcnt: lanes below this one.
FOVEA_DEVICE std::int32_t lane_idx() {
  const std::uint32_t below = __builtin_amdgcn_mbcnt_lo(~0U, 0U);
  if constexpr (kWarpLanes == 32) return static_cast<std::int32_t>(below);
  return static_cast<std::int32_t>(__builtin_amdgcn_mbcnt_hi(~0U, below));
}

/// v_readfirstlane, so that the compiler knows it as uniform.
FOVEA_DEVICE std::int32_t warp_idx() {
  return __builtin_amdgcn_readfirstlane(thread_idx().x / kWarpLanes);
}

/// Where LDS begins that the launch asks for.
FOVEA_DEVICE SharedAddress dynamic_shared() {
  extern __shared__ __attribute__((aligned(1024))) unsigned char fovea_dynamic_shared[];
  using Local = __attribute__((address_space(3))) unsigned char;
  return static_cast<SharedAddress>(reinterpret_cast<std::size_t>(
      (Local*)fovea_dynamic_shared));  // no named cast changes the space
}

/// s_trap: ends the grid with an error.
FOVEA_DEVICE void trap() { __builtin_trap(); }

}  // namespace fovea::cuda::ptx
