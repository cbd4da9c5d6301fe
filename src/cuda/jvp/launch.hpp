// From arguments to launches: the parameters and grids of a forward-mode call. Where they run, on a device or in the
// emulator, is not known here. Read attention_jvp.hpp first.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device/shared/jvp_params.h"
#include "cuda/jvp/attention_jvp.hpp"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// Each has its columns of V.
inline constexpr int kMostJvpLaunches = 3;

struct JvpLaunch {
  JvpParams params[kMostJvpLaunches];
  int num_launches = 0;
  std::uint32_t num_ctas = 0;     // of each
  RangeTableLaunch range_tables;  // empty where the mask needs none

  KernelLaunches launches(const JvpPlan& plan) const;
};

/// `workspace` holds plan.workspace_bytes, aligned to 256.
JvpLaunch jvp_launch(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                     void* workspace);

}  // namespace fovea::cuda
