// What all device text stands on: how a device function is declared, where a thread is, where shared memory begins.
// Read memory.cuh next. One function per instruction lives in ptx/; each comment gives its section in the PTX ISA
// (names of chapters 9.7 and 10; their numbers move between releases), the least architecture where that is not sm_80,
// and what must hold before; what stands in for it on sm_75, where kernels of that need no other text. Kernels write no
// asm.
#pragma once

#include "shared/types.h"

#define FOVEA_DEVICE static __device__ __forceinline__
#define FOVEA_DEVICE_MEMBER __device__ __forceinline__
// A call, of kernels of mma.sync: for what is seldom done, and stands at so many places that it would be most of what
// is compiled.
#define FOVEA_DEVICE_CALL static __device__ __noinline__

namespace fovea::cuda::ptx {

/// An address in the shared window of this CTA. With clusters, addresses of other CTAs come from cluster.cuh.
using SharedAddress = std::uint32_t;

struct Index3 {
  std::int32_t x, y, z;
};

/// Threads of a warp: of this machine. On AMD (amd/ptx/base.cuh) they are 32 or 64.
inline constexpr std::int32_t kWarpLanes = 32;
/// A bit for each of them, as votes give it.
using LaneMask = std::uint32_t;

/// The bits of `from` as another type of the same size.
template <class To, class From>
FOVEA_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits move between types of one size");
  return __builtin_bit_cast(To, from);
}

/// %tid (Special Registers).
FOVEA_DEVICE Index3 thread_idx() {
  Index3 idx;
  asm("mov.u32 %0, %%tid.x;" : "=r"(idx.x));
  asm("mov.u32 %0, %%tid.y;" : "=r"(idx.y));
  asm("mov.u32 %0, %%tid.z;" : "=r"(idx.z));
  return idx;
}

/// %ctaid (Special Registers).
FOVEA_DEVICE Index3 block_idx() {
  Index3 idx;
  asm("mov.u32 %0, %%ctaid.x;" : "=r"(idx.x));
  asm("mov.u32 %0, %%ctaid.y;" : "=r"(idx.y));
  asm("mov.u32 %0, %%ctaid.z;" : "=r"(idx.z));
  return idx;
}

/// %nctaid (Special Registers).
FOVEA_DEVICE Index3 grid_dim() {
  Index3 dim;
  asm("mov.u32 %0, %%nctaid.x;" : "=r"(dim.x));
  asm("mov.u32 %0, %%nctaid.y;" : "=r"(dim.y));
  asm("mov.u32 %0, %%nctaid.z;" : "=r"(dim.z));
  return dim;
}

/// %ntid (Special Registers).
FOVEA_DEVICE Index3 block_dim() {
  Index3 dim;
  asm("mov.u32 %0, %%ntid.x;" : "=r"(dim.x));
  asm("mov.u32 %0, %%ntid.y;" : "=r"(dim.y));
  asm("mov.u32 %0, %%ntid.z;" : "=r"(dim.z));
  return dim;
}

/// %laneid (Special Registers).
FOVEA_DEVICE std::int32_t lane_idx() {
  std::int32_t idx;
  asm("mov.u32 %0, %%laneid;" : "=r"(idx));
  return idx;
}

/// tid.x / 32, by shfl.sync so that the compiler knows it as uniform. The block must be one-dimensional and the warp
/// converged.
FOVEA_DEVICE std::int32_t warp_idx() {
  std::int32_t tid, idx;
  asm("mov.u32 %0, %%tid.x;" : "=r"(tid));
  asm volatile("shfl.sync.idx.b32 %0, %1, 0, 0x1f, 0xffffffff;" : "=r"(idx) : "r"(tid / 32));
  return idx;
}

/// Where the dynamic shared memory of the launch begins: a multiple of 1024, the longest period of a swizzle.
FOVEA_DEVICE SharedAddress dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char fovea_dynamic_shared[];
  SharedAddress address;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }"
      : "=r"(address)
      : "l"(fovea_dynamic_shared));
  return address;
}

/// trap (Miscellaneous): ends the grid with an error.
FOVEA_DEVICE void trap() { asm volatile("trap;"); }

}  // namespace fovea::cuda::ptx
