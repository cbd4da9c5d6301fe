// Zeroes the counter by which a kernel claims its work, just ahead of that kernel, which may start meanwhile: behind a
// memset it could not.
#pragma once

#include "ptx/base.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/memory.cuh"
#include "shared/clear_counter.h"

namespace fovea::cuda {

/// One thread.
FOVEA_DEVICE void clear_counter(const ClearCounterParams& p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::st_global(p.counter, std::int32_t{0});
}

}  // namespace fovea::cuda
