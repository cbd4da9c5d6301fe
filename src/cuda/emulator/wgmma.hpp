// Products of a warpgroup in flight: what ends with a warp.
#pragma once

#include "cuda/emulator/machine.hpp"

namespace fovea::cuda::emulator {

/// Products that nobody committed or waited for.
void check_wgmma_at_exit(Machine& machine, const Warp& warp);

}  // namespace fovea::cuda::emulator
