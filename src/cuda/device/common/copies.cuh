// Chunks of 16 bytes from global to shared memory, by the thread that will wait for them. From sm_80 on by cp.async, in
// groups that land while the thread computes. sm_75 has none: a chunk passes through registers and is there at once;
// what is to come beside products is held in ChunkWords instead.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "shared/instructions.h"

namespace fovea::cuda {

/// From `from`, which can be read; or zeros. Both addresses are multiples of 16.
template <Instructions instructions>
FOVEA_DEVICE void copy_chunk_or_zero(ptx::SharedAddress to, const void* from, bool is_there) {
  if constexpr (instructions == Instructions::sm75) {
    ptx::U32x4 words{0, 0, 0, 0};
    if (is_there) words = ptx::ld_global_nc(static_cast<const ptx::U32x4*>(from));
    ptx::st_shared(to, words);
  } else {
    ptx::cp_async_16_or_zero(to, from, is_there);
  }
}

/// Closes the group of this thread's copies since the last one.
template <Instructions instructions>
FOVEA_DEVICE void commit_copies() {
  if constexpr (instructions == Instructions::sm80) ptx::cp_async_commit_group();
}

/// All but the `pending` newest groups of this thread have landed.
template <Instructions instructions, int pending = 0>
FOVEA_DEVICE void wait_for_copies() {
  if constexpr (instructions == Instructions::sm80) ptx::cp_async_wait_group<pending>();
}

}  // namespace fovea::cuda
