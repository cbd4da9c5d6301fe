// The emulated twin of src/cuda/device/ptx/base.cuh.
#pragma once

#include <bit>

#include "cuda/emulator/instructions.hpp"
#include "shared/types.h"

#define FOVEA_DEVICE static inline
#define FOVEA_DEVICE_MEMBER inline
#define FOVEA_DEVICE_CALL static inline

namespace fovea::cuda::ptx {

using emulator::Instruction;
using emulator::Site;

using SharedAddress = std::uint32_t;

struct Index3 {
  std::int32_t x, y, z;
};

#if FOVEA_EMULATED_LANES == 64  // as on AMD's CDNA: of a whole program, which launches with as many
inline constexpr std::int32_t kWarpLanes = 64;
using LaneMask = std::uint64_t;
#else
inline constexpr std::int32_t kWarpLanes = 32;
using LaneMask = std::uint32_t;
#endif

template <class To, class From>
FOVEA_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits move between types of one size");
  return __builtin_bit_cast(To, from);
}

FOVEA_DEVICE Index3 index3(emulator::Dim3 dim) { return {dim.x, dim.y, dim.z}; }

FOVEA_DEVICE Index3 thread_idx() { return index3(emulator::thread_idx()); }
FOVEA_DEVICE Index3 block_idx() { return index3(emulator::block_idx()); }
FOVEA_DEVICE Index3 grid_dim() { return index3(emulator::grid_dim()); }
FOVEA_DEVICE Index3 block_dim() { return index3(emulator::block_dim()); }
FOVEA_DEVICE std::int32_t lane_idx() { return static_cast<std::int32_t>(emulator::lane_idx()); }

/// The real one shuffles: the warp must be converged.
FOVEA_DEVICE std::int32_t warp_idx(Site site = Site::here()) {
  return static_cast<std::int32_t>(
      emulator::shuffle(emulator::warp_idx(), 0, {"warp_idx (shfl.sync)", site}));
}

FOVEA_DEVICE SharedAddress dynamic_shared() { return emulator::dynamic_shared(); }

FOVEA_DEVICE void trap(Site site = Site::here()) { emulator::trap(site); }

}  // namespace fovea::cuda::ptx
