// CTAs of a cluster: who they are, how they meet, and each other's shared memory (sm_90). An address of another CTA's
// shared memory comes from mapa; the other CTA must have started (a cluster barrier) and must not have exited (another
// one at the end).
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

/// %cluster_ctarank (Special Registers).
FOVEA_DEVICE std::int32_t cluster_cta_rank() {
  std::int32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// %cluster_nctarank (Special Registers).
FOVEA_DEVICE std::int32_t cluster_num_ctas() {
  std::int32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

/// barrier.cluster.arrive.release.aligned (Synchronization): all threads of the warp together.
FOVEA_DEVICE void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/// barrier.cluster.arrive.relaxed.aligned (Synchronization): orders nothing; for "nobody has exited yet" or after a
/// fence.
FOVEA_DEVICE void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// barrier.cluster.wait.acquire.aligned (Synchronization): until every thread of the cluster has arrived, or exited.
FOVEA_DEVICE void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// mapa.shared::cluster (Data Movement): where `address` of this CTA lies in CTA `rank`. For rank 1 and up, bits 24 and
/// above are set.
FOVEA_DEVICE SharedAddress mapa(SharedAddress address, std::int32_t rank) {
  SharedAddress mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

/// ld.shared::cluster (Data Movement), 4 bytes.
template <class T>
FOVEA_DEVICE T ld_shared_cluster(SharedAddress from) {
  static_assert(sizeof(T) == 4, "reads 4 bytes");
  std::uint32_t r;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(r) : "r"(from) : "memory");
  return bit_cast<T>(r);
}

/// st.shared::cluster (Data Movement), 4 or 16 bytes, aligned to them.
template <class T>
FOVEA_DEVICE void st_shared_cluster(SharedAddress to, const T& value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16, "writes 4 or 16 bytes");
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(bit_cast<std::uint32_t>(value))
                 : "memory");
  } else {
    const U32x4 v = bit_cast<U32x4>(value);
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
  }
}

/// st.async (Data Movement), 4, 8 or 16 bytes, aligned to them, to another CTA: complete_tx of as many bytes on that
/// CTA's `barrier`.
template <class T>
FOVEA_DEVICE void st_async(SharedAddress to, const T& value, SharedAddress barrier) {
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(bit_cast<std::uint32_t>(value)), "r"(barrier)
        : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const U32x2 v = bit_cast<U32x2>(value);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, "
        "[%3];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(barrier)
        : "memory");
  } else {
    static_assert(sizeof(T) == 16, "writes 4, 8 or 16 bytes");
    const U32x4 v = bit_cast<U32x4>(value);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
  }
}

}  // namespace fovea::cuda::ptx
