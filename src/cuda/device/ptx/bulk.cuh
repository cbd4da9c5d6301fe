// One-dimensional asynchronous copies, and the groups in which stores and reductions are waited for (Data Movement:
// cp.async.bulk, cp.reduce.async.bulk; sm_90). One thread issues a copy. Addresses and sizes are multiples of 16 bytes.
// Shared memory that ordinary stores wrote needs fence_proxy_async_shared_cta and a barrier first. Tiles of tensors are
// in tma.cuh.
#pragma once

#include "ptx/base.cuh"
#include "shared/cache_policy.h"

namespace fovea::cuda::ptx {

/// cp.async.bulk global to shared: complete_tx of `bytes` on `barrier`, which must expect them.
FOVEA_DEVICE void cp_async_bulk_load(SharedAddress dst, const void* src, std::uint32_t bytes,
                                     SharedAddress barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(barrier), "l"(static_cast<std::uint64_t>(policy))
      : "memory");
}

/// cp.async.bulk shared to the shared memory of a CTA of the cluster: `dst` and `barrier` are of that CTA, as mapa
/// gives them.
FOVEA_DEVICE void cp_async_bulk_shared_to_cluster(SharedAddress dst, SharedAddress src,
                                                  std::uint32_t bytes, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(dst),
      "r"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

/// cp.async.bulk shared to global, in the thread's current bulk group.
FOVEA_DEVICE void cp_async_bulk_store(void* dst, SharedAddress src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

/// cp.reduce.async.bulk add.f32: global += shared, element by element, relaxed at device scope, in the current bulk
/// group.
FOVEA_DEVICE void cp_reduce_async_bulk_add_f32(float* dst, SharedAddress src, std::uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}

/// cp.async.bulk.commit_group: closes the group of this thread's bulk stores and reductions since the last one.
FOVEA_DEVICE void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// cp.async.bulk.wait_group N: all but the N newest groups of this thread are complete: what they wrote is written.
template <int N>
FOVEA_DEVICE void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

/// cp.async.bulk.wait_group.read N: all but the N newest groups have read their shared memory, which may be written
/// again.
template <int N>
FOVEA_DEVICE void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

/// cp.async.bulk.prefetch.L2: `bytes` at `src` are wanted soon.
FOVEA_DEVICE void cp_async_bulk_prefetch_l2(const void* src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

}  // namespace fovea::cuda::ptx
