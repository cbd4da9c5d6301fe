// How far a walk over queries has come, for walks that take turns at adding to dq: one number in memory for each tile
// of keys. sm90/backward/turns.cuh has the idea.
#pragma once

#include "ptx/memory.cuh"
#include "shared/staggered_walk.h"

namespace fovea::cuda {

/// Where progress is kept, and how positions are counted.
template <bool is_staggered>
struct WalkProgress {
  /// The word of a walk that has ended, less the tiles of keys before it that may not have: more than there are
  /// positions.
  static constexpr std::int32_t kEnded = 0x40000000;

  std::int32_t* word;       // of this CTA; those of lower keys of its head lie before it
  std::int32_t num_before;  // of them
  std::int32_t first_head, num_tiles;
  StaggeredWalk staggered;  // is_staggered

  FOVEA_DEVICE_MEMBER std::int32_t position(std::int32_t tile, std::int32_t q_head) const {
    if constexpr (is_staggered) return (q_head - first_head) * num_tiles + staggered.position(tile);
    return (q_head - first_head + 1) * num_tiles - 1 - tile;
  }

  /// The position of the tile in the walk before, which has to be over; -1: there is nobody to wait for.
  FOVEA_DEVICE_MEMBER std::int32_t awaited(std::int32_t tile, std::int32_t q_head) const {
    if constexpr (is_staggered) {
      if (staggered.is_first(tile)) return -1;
      return (q_head - first_head) * num_tiles + staggered.position_before(tile);
    }
    return position(tile, q_head);
  }

  /// Until lower keys are done with the position. `num_watched` of them may not have ended; `changed()` where it has
  /// become less.
  template <class Changed>
  FOVEA_DEVICE_MEMBER void await_others(std::int32_t position, std::int32_t& num_watched,
                                        Changed&& changed) const {
    if constexpr (is_staggered) {
      while (position >= 0 && ptx::ld_acquire_global(word - 1) <= position) {
      }
      return;
    }
    while (num_watched > 0) {
      const std::int32_t done = ptx::ld_acquire_global(word + (num_watched - num_before - 1));
      if (done >= kEnded) {
        num_watched = done - kEnded;
        changed();
      } else if (done > position) {
        return;
      }
    }
  }
};

}  // namespace fovea::cuda
