// Barriers in shared memory that count arrivals and bytes of asynchronous copies (Synchronization: mbarrier). An
// mbarrier is 8 bytes, aligned to 8. It is in phase 0, 1, 0, ...: waiting for parity p passes once a phase of parity p
// is complete, so a fresh barrier lets wait(1) pass at once. A waiter must not fall two phases behind: parities would
// alias. All need sm_90 but where said. Read tma.cuh or bulk.cuh next.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// mbarrier.init (sm_80): phase 0 expects `count` arrivals, 1 to 2^20 - 1. One thread does it; the others come through
/// a barrier after it, and the async proxy and the cluster through fence_mbarrier_init_release_cluster.
FOVEA_DEVICE void mbarrier_init(SharedAddress barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/// mbarrier.inval (sm_80): ends the barrier's life, so that its bytes may serve otherwise. Nobody may wait or arrive
/// any more.
FOVEA_DEVICE void mbarrier_inval(SharedAddress barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive (sm_80): one arrival, release within the CTA.
FOVEA_DEVICE void mbarrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive with a count: `count` arrivals at once.
FOVEA_DEVICE void mbarrier_arrive_count(SharedAddress barrier, std::uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

/// mbarrier.arrive.expect_tx: the phase waits for `bytes` more of asynchronous copies; then one arrival. At most 2^20 -
/// 1 bytes may be outstanding in a phase.
FOVEA_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// mbarrier.expect_tx: the bytes alone, without an arrival.
FOVEA_DEVICE void mbarrier_expect_tx(SharedAddress barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// mbarrier.arrive on a barrier of another CTA of the cluster, `remote` being what mapa gave. Plain, not
/// .release.cluster: that one waits for all earlier memory operations of the thread (CGAERRBAR in SASS; a whole kernel
/// ran 1.6x slower, H200). It orders reads of shared memory before the arrival, which is what handing back a buffer
/// needs.
FOVEA_DEVICE void mbarrier_arrive_remote(SharedAddress remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

/// mbarrier.arrive.release.cluster on a barrier of another CTA: what this thread wrote before is seen by whoever waits
/// with mbarrier_wait_parity_acquire_cluster.
FOVEA_DEVICE void mbarrier_arrive_release_remote(SharedAddress remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}

/// mbarrier.test_wait.parity (sm_80): is a phase of this parity complete? Acquires within the CTA if so.
FOVEA_DEVICE bool mbarrier_test_wait_parity(SharedAddress barrier, std::uint32_t parity) {
  std::uint32_t r;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(r)
      : "r"(barrier), "r"(parity)
      : "memory");
  return r != 0;
}

/// mbarrier.try_wait.parity: as test_wait, but may sleep a while before it says no.
FOVEA_DEVICE bool mbarrier_try_wait_parity(SharedAddress barrier, std::uint32_t parity) {
  std::uint32_t r;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(r)
      : "r"(barrier), "r"(parity)
      : "memory");
  return r != 0;
}

/// mbarrier.try_wait.parity until it says yes. The loop stands in the asm: ptxas keeps it at two instructions.
FOVEA_DEVICE void mbarrier_wait_parity(SharedAddress barrier, std::uint32_t parity) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; "
      "bra WAIT; DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// mbarrier.try_wait.parity.acquire.cluster until it says yes: sees what threads of other CTAs wrote before a
/// release.cluster.
FOVEA_DEVICE void mbarrier_wait_parity_acquire_cluster(SharedAddress barrier,
                                                       std::uint32_t parity) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; "
      "@p bra DONE; bra WAIT; DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// cp.async.mbarrier.arrive.noinc (sm_80): one of the counted arrivals, made when all earlier cp.async of this thread
/// have landed.
FOVEA_DEVICE void cp_async_mbarrier_arrive_noinc(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace fovea::cuda::ptx
