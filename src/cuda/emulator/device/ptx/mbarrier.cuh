// The emulated twin of src/cuda/device/ptx/mbarrier.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void mbarrier_init(SharedAddress barrier, std::uint32_t count,
                                Site site = Site::here()) {
  emulator::mbarrier_init(barrier, count, {"mbarrier.init", site});
}

FOVEA_DEVICE void mbarrier_inval(SharedAddress barrier, Site site = Site::here()) {
  emulator::mbarrier_inval(barrier, {"mbarrier.inval", site});
}

FOVEA_DEVICE void mbarrier_arrive(SharedAddress barrier, Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, 1, 0, {"mbarrier.arrive", site});
}

FOVEA_DEVICE void mbarrier_arrive_count(SharedAddress barrier, std::uint32_t count,
                                        Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, count, 0, {"mbarrier.arrive", site});
}

FOVEA_DEVICE void mbarrier_arrive_expect_tx(SharedAddress barrier, std::uint32_t bytes,
                                            Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, 1, bytes, {"mbarrier.arrive.expect_tx", site});
}

FOVEA_DEVICE void mbarrier_expect_tx(SharedAddress barrier, std::uint32_t bytes,
                                     Site site = Site::here()) {
  emulator::mbarrier_arrive(barrier, 0, bytes, {"mbarrier.expect_tx", site});
}

FOVEA_DEVICE void mbarrier_arrive_remote(SharedAddress remote, Site site = Site::here()) {
  emulator::mbarrier_arrive(remote, 1, 0, {"mbarrier.arrive (remote)", site});
}

FOVEA_DEVICE void mbarrier_arrive_release_remote(SharedAddress remote, Site site = Site::here()) {
  emulator::mbarrier_arrive(remote, 1, 0, {"mbarrier.arrive.release.cluster", site});
}

FOVEA_DEVICE bool mbarrier_test_wait_parity(SharedAddress barrier, std::uint32_t parity,
                                            Site site = Site::here()) {
  return emulator::mbarrier_test_wait(barrier, parity, {"mbarrier.test_wait", site});
}

FOVEA_DEVICE bool mbarrier_try_wait_parity(SharedAddress barrier, std::uint32_t parity,
                                           Site site = Site::here()) {
  return emulator::mbarrier_try_wait(barrier, parity, {"mbarrier.try_wait", site});
}

FOVEA_DEVICE void mbarrier_wait_parity(SharedAddress barrier, std::uint32_t parity,
                                       Site site = Site::here()) {
  emulator::mbarrier_wait(barrier, parity, {"mbarrier.try_wait", site});
}

FOVEA_DEVICE void mbarrier_wait_parity_acquire_cluster(SharedAddress barrier, std::uint32_t parity,
                                                       Site site = Site::here()) {
  emulator::mbarrier_wait(barrier, parity, {"mbarrier.try_wait.acquire.cluster", site});
}

FOVEA_DEVICE void cp_async_mbarrier_arrive_noinc(SharedAddress barrier, Site site = Site::here()) {
  emulator::cp_async_mbarrier_arrive(barrier, {"cp.async.mbarrier.arrive", site});
}

}  // namespace fovea::cuda::ptx
