// The emulated twin of src/cuda/device/ptx/barrier.cuh, and of src/cuda/amd/ptx/barrier.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void fence_release_workgroup(Site site = Site::here()) {
  emulator::fence_release_workgroup({"fence release workgroup", site});
}

FOVEA_DEVICE void fence_acquire_workgroup(Site site = Site::here()) {
  emulator::fence_acquire_workgroup({"fence acquire workgroup", site});
}

FOVEA_DEVICE void barrier_alone(Site site = Site::here()) {
  emulator::barrier_alone({"s_barrier", site});
}

FOVEA_DEVICE void sync_threads(Site site = Site::here()) {
  emulator::bar_sync(0, 0, {"bar.sync", site});
}

FOVEA_DEVICE void bar_sync(std::int32_t id, std::int32_t threads, Site site = Site::here()) {
  emulator::bar_sync(id, threads, {"bar.sync", site});
}

FOVEA_DEVICE void bar_arrive(std::int32_t id, std::int32_t threads, Site site = Site::here()) {
  emulator::bar_arrive(id, threads, {"bar.arrive", site});
}

}  // namespace fovea::cuda::ptx
