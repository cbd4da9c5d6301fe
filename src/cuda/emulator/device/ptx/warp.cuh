// The emulated twin of src/cuda/device/ptx/warp.cuh.
#pragma once

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

template <class T>
FOVEA_DEVICE T shfl_bfly(const T& value, std::int32_t mask, Site site = Site::here()) {
  static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
  const Instruction what{"shfl.sync", site};
  emulator::check_registers(&value, sizeof value, what);
  const auto lane = emulator::lane_idx() ^ static_cast<std::uint32_t>(mask);
  return bit_cast<T>(emulator::shuffle(bit_cast<std::uint32_t>(value), lane, what));
}

template <class T>
FOVEA_DEVICE T shfl_idx(const T& value, std::int32_t lane, Site site = Site::here()) {
  static_assert(sizeof(T) == 4, "a shuffle moves 4 bytes");
  const Instruction what{"shfl.sync", site};
  emulator::check_registers(&value, sizeof value, what);
  return bit_cast<T>(
      emulator::shuffle(bit_cast<std::uint32_t>(value), static_cast<std::uint32_t>(lane), what));
}

FOVEA_DEVICE LaneMask ballot(bool is_true, Site site = Site::here()) {
  return static_cast<LaneMask>(emulator::ballot(is_true, {"vote.sync", site}));
}

FOVEA_DEVICE bool vote_any(bool is_true, Site site = Site::here()) {
  return emulator::ballot(is_true, {"vote.sync", site}) != 0;
}

FOVEA_DEVICE bool vote_all(bool is_true, Site site = Site::here()) {
  return emulator::ballot(!is_true, {"vote.sync", site}) == 0;
}

FOVEA_DEVICE void sync_warp(Site site = Site::here()) {
  emulator::sync_warp({"bar.warp.sync", site});
}

FOVEA_DEVICE bool elect_one(Site site = Site::here()) {
  return emulator::elect({"elect.sync", site});
}

}  // namespace fovea::cuda::ptx
