// Fences between the generic proxy (ordinary loads and stores) and the async proxy (TMA, bulk copies, wgmma's reads of
// shared memory), and for freshly initialised mbarriers (Synchronization: membar / fence). All need sm_90.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

/// fence.proxy.async.shared::cta: this thread's earlier accesses to shared memory come before later ones of the async
/// proxy. Each writing thread runs it, then a barrier, then somebody issues wgmma or a bulk store.
FOVEA_DEVICE void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// fence.proxy.async.global: the same for global memory, where a bulk load or TMA reads what ordinary stores wrote.
FOVEA_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// fence.proxy.async: the same for every state space.
FOVEA_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// fence.mbarrier_init.release.cluster: mbarriers that this thread initialised are seen by the async proxy and by the
/// cluster, once those come through a barrier.
FOVEA_DEVICE void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// fence.acq_rel.cluster.
FOVEA_DEVICE void fence_acq_rel_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

}  // namespace fovea::cuda::ptx
