// The emulated twin of src/cuda/amd/ptx/copy_to_shared.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE void copy_to_shared_4(SharedAddress to, const void* from, Site site = Site::here()) {
  emulator::copy_to_shared(to, from, 4, {"global_load_lds_dword", site});
}

FOVEA_DEVICE void copy_to_shared_16(SharedAddress to, const void* from, Site site = Site::here()) {
  emulator::copy_to_shared(to, from, 16, {"global_load_lds_dwordx4", site});
}

template <int N>
FOVEA_DEVICE void wait_for_copies(Site site = Site::here()) {
  emulator::cp_async_wait(N, {"s_waitcnt vmcnt", site});
}

}  // namespace fovea::cuda::ptx
