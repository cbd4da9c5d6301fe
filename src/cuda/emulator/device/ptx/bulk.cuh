// The emulated twin of src/cuda/device/ptx/bulk.cuh. Cache policies and prefetches change no result.
#pragma once

#include "ptx/base.cuh"
#include "shared/cache_policy.h"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void cp_async_bulk_load(SharedAddress dst, const void* src, std::uint32_t bytes,
                                     SharedAddress barrier, CachePolicy, Site site = Site::here()) {
  emulator::bulk_load(dst, src, bytes, barrier, {"cp.async.bulk", site});
}

FOVEA_DEVICE void cp_async_bulk_shared_to_cluster(SharedAddress dst, SharedAddress src,
                                                  std::uint32_t bytes, SharedAddress barrier,
                                                  Site site = Site::here()) {
  emulator::bulk_copy_to_cluster(dst, src, bytes, barrier, {"cp.async.bulk.shared::cluster", site});
}

FOVEA_DEVICE void cp_async_bulk_store(void* dst, SharedAddress src, std::uint32_t bytes,
                                      Site site = Site::here()) {
  emulator::bulk_store(dst, src, bytes, false, {"cp.async.bulk.global", site});
}

FOVEA_DEVICE void cp_reduce_async_bulk_add_f32(float* dst, SharedAddress src, std::uint32_t bytes,
                                               Site site = Site::here()) {
  emulator::bulk_store(dst, src, bytes, true, {"cp.reduce.async.bulk", site});
}

FOVEA_DEVICE void cp_async_bulk_commit_group(Site site = Site::here()) {
  emulator::bulk_commit({"cp.async.bulk.commit_group", site});
}

template <int N>
FOVEA_DEVICE void cp_async_bulk_wait_group(Site site = Site::here()) {
  emulator::bulk_wait(N, false, {"cp.async.bulk.wait_group", site});
}

template <int N>
FOVEA_DEVICE void cp_async_bulk_wait_group_read(Site site = Site::here()) {
  emulator::bulk_wait(N, true, {"cp.async.bulk.wait_group.read", site});
}

FOVEA_DEVICE void cp_async_bulk_prefetch_l2(const void*, std::uint32_t) {}

}  // namespace fovea::cuda::ptx
