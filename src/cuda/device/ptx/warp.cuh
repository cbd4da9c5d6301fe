// What the lanes of a warp do together. All of them must be converged at each call: the member mask is always the full
// warp. Read barrier.cuh next.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// shfl.sync.bfly.b32 (Data Movement): the value of lane ^ mask.
template <class T>
FOVEA_DEVICE T shfl_bfly(const T& value, std::int32_t mask) {
  static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
  std::uint32_t r;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(r)
               : "r"(bit_cast<std::uint32_t>(value)), "r"(mask));
  return bit_cast<T>(r);
}

/// shfl.sync.idx.b32 (Data Movement): the value of lane `lane`, which may differ between lanes.
template <class T>
FOVEA_DEVICE T shfl_idx(const T& value, std::int32_t lane) {
  static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
  std::uint32_t r;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(r)
               : "r"(bit_cast<std::uint32_t>(value)), "r"(lane));
  return bit_cast<T>(r);
}

/// vote.sync.any.pred (Synchronization).
FOVEA_DEVICE bool vote_any(bool is_true) {
  std::uint32_t r;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.any.pred q, p, 0xffffffff; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(r)
      : "r"(static_cast<std::uint32_t>(is_true)));
  return r != 0;
}

/// vote.sync.all.pred (Synchronization).
FOVEA_DEVICE bool vote_all(bool is_true) {
  std::uint32_t r;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.all.pred q, p, 0xffffffff; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(r)
      : "r"(static_cast<std::uint32_t>(is_true)));
  return r != 0;
}

/// vote.sync.ballot.b32 (Synchronization): bit i is what lane i says.
FOVEA_DEVICE LaneMask ballot(bool is_true) {
  LaneMask r;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(r)
               : "r"(static_cast<std::uint32_t>(is_true)));
  return r;
}

/// bar.warp.sync (Synchronization): memory operations of the lanes before it are seen by the lanes after it.
FOVEA_DEVICE void sync_warp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

/// elect.sync (Synchronization), sm_90: true in one lane, always the same one, and known to the compiler as one lane.
FOVEA_DEVICE bool elect_one() {
  std::uint32_t r;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(r));
  return r != 0;
}

}  // namespace fovea::cuda::ptx
