// The emulated twin of src/cuda/device/ptx/cp_async.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void cp_async_16(SharedAddress dst, const void* src, std::uint32_t src_bytes,
                              Site site = Site::here()) {
  emulator::cp_async(dst, src, 16, src_bytes, {"cp.async", site});
}

FOVEA_DEVICE void cp_async_16_or_zero(SharedAddress dst, const void* src, bool is_there,
                                      Site site = Site::here()) {
  emulator::cp_async(dst, src, 16, is_there ? 16 : 0, {"cp.async", site});
}

FOVEA_DEVICE void cp_async_8(SharedAddress dst, const void* src, std::uint32_t src_bytes,
                             Site site = Site::here()) {
  emulator::cp_async(dst, src, 8, src_bytes, {"cp.async", site});
}

FOVEA_DEVICE void cp_async_4(SharedAddress dst, const void* src, std::uint32_t src_bytes,
                             Site site = Site::here()) {
  emulator::cp_async(dst, src, 4, src_bytes, {"cp.async", site});
}

FOVEA_DEVICE void cp_async_commit_group(Site site = Site::here()) {
  emulator::cp_async_commit({"cp.async.commit_group", site});
}

template <int N>
FOVEA_DEVICE void cp_async_wait_group(Site site = Site::here()) {
  emulator::cp_async_wait(N, {"cp.async.wait_group", site});
}

}  // namespace fovea::cuda::ptx
