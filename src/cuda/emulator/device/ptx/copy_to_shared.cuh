// The emulated twin of src/cuda/amd/ptx/copy_to_shared.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

template <int bytes>
FOVEA_DEVICE void copy_to_shared(SharedAddress to, const void* from, Site site = Site::here()) {
  static_assert(bytes == 4 || bytes == 16, "a lane's copy has 4 or 16 bytes");
  emulator::copy_to_shared(to, from, bytes, {"global_load_lds", site});
}

template <int N>
FOVEA_DEVICE void wait_for_copies(Site site = Site::here()) {
  emulator::cp_async_wait(N, {"s_waitcnt vmcnt", site});
}

}  // namespace fovea::cuda::ptx
