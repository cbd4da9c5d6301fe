// Copies from global to shared memory that do not pass through registers and are waited for in groups, per thread (Data
// Movement). What has landed is seen by the waiting thread; by others of the CTA after a barrier.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// cp.async.cg 16 bytes: the first src_bytes (0..16) come from `src`, the rest are zero. Both addresses are multiples
/// of 16; with src_bytes 0 nothing is read, but let `src` be an address of the tensor all the same.
FOVEA_DEVICE void cp_async_16(SharedAddress dst, const void* src, std::uint32_t src_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
               : "memory");
}

/// cp.async.cg 16 bytes with ignore-src: from `src`, or zero where it is not there. Cheaper than a src_bytes that
/// varies, which costs five instructions of address arithmetic (SASS).
FOVEA_DEVICE void cp_async_16_or_zero(SharedAddress dst, const void* src, bool is_there) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p; }" ::"r"(
          dst),
      "l"(src), "r"(static_cast<std::uint32_t>(is_there))
      : "memory");
}

/// cp.async.ca 8 bytes; alignment 8, else as cp_async_16.
FOVEA_DEVICE void cp_async_8(SharedAddress dst, const void* src, std::uint32_t src_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
               : "memory");
}

/// cp.async.ca 4 bytes; alignment 4, else as cp_async_16.
FOVEA_DEVICE void cp_async_4(SharedAddress dst, const void* src, std::uint32_t src_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
               : "memory");
}

/// cp.async.commit_group: closes the group of this thread's copies since the last one.
FOVEA_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// cp.async.wait_group N: all but the N newest groups of this thread have landed.
template <int N>
FOVEA_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace fovea::cuda::ptx
