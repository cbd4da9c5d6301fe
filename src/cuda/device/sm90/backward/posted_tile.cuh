// A tile of the walk as the loading warp of Hopper's backward kernels posts it to the groups that multiply.
#pragma once

#include "common/backward_work.cuh"

namespace fovea::cuda::sm90 {

struct PostedTile {
  std::uint32_t word;  // is_full, is_last, 30 bits of the index
  std::int32_t q_head;

  FOVEA_DEVICE PostedTile make(const WalkedTile& tile, bool is_last) {
    return {(tile.is_full ? 0x80000000U : 0U) | (is_last ? 0x40000000U : 0U) |
                static_cast<std::uint32_t>(tile.idx),
            tile.q_head};
  }
  /// The walk has no tile.
  FOVEA_DEVICE PostedTile none() { return {0x3fffffffU, 0}; }
  FOVEA_DEVICE_MEMBER std::int32_t idx() const {
    return static_cast<std::int32_t>(word & 0x3fffffffU);
  }
  FOVEA_DEVICE_MEMBER bool is_full() const { return static_cast<std::int32_t>(word) < 0; }
  FOVEA_DEVICE_MEMBER bool is_last() const { return (word & 0x40000000U) != 0; }
  FOVEA_DEVICE_MEMBER bool is_none() const { return word == none().word; }
};

}  // namespace fovea::cuda::sm90
