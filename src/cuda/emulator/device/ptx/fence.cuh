// The emulated twin of src/cuda/device/ptx/fence.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void fence_proxy_async_shared_cta(Site site = Site::here()) {
  emulator::fence_proxy_async(true, false, {"fence.proxy.async.shared::cta", site});
}

FOVEA_DEVICE void fence_proxy_async_global(Site site = Site::here()) {
  emulator::fence_proxy_async(false, true, {"fence.proxy.async.global", site});
}

FOVEA_DEVICE void fence_proxy_async(Site site = Site::here()) {
  emulator::fence_proxy_async(true, true, {"fence.proxy.async", site});
}

FOVEA_DEVICE void fence_mbarrier_init_release_cluster(Site site = Site::here()) {
  emulator::fence_mbarrier_init({"fence.mbarrier_init", site});
}

FOVEA_DEVICE void fence_acq_rel_cluster(Site site = Site::here()) {
  emulator::fence_acq_rel({"fence.acq_rel.cluster", site});
}

}  // namespace fovea::cuda::ptx
