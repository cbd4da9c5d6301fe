// From arguments to launches: the parameters and grids of a backward call. Where they run, on a device or in the
// emulator, is not known here. Read attention_backward.hpp first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/captured.hpp"
#include "cuda/device/shared/backward_params.h"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// Two walks of sm90/attention_backward_wide, what clears words ahead of them, and three that compute tiles again.
inline constexpr std::size_t kMostBackwardSteps = 6;

struct BackwardLaunch {
  BackwardParams params;
  RangeTableLaunch range_tables;                    // empty where the mask needs none
  CapturedLaunch captured;                          // of gradients of captured data
  std::uint32_t num_delta_ctas = 0;                 // of common/backward_delta
  std::uint32_t num_ctas[kMostBackwardSteps] = {};  // of each of the plan's steps that owns rows
  std::uint32_t num_sink_ctas = 0;                  // of common/backward_sinks

  /// Of the kernels of device/sm80: range tables, statistics of rows, the plan's steps, captured data, dsinks.
  KernelLaunches launches(const BackwardPlan& plan) const;

  // The pieces of it, which others put together with their own.
  void add_before(KernelLaunches& all) const;
  void add_after(KernelLaunches& all) const;
};

/// The kernel of a step, on so many CTAs.
template <class Params>
KernelLaunch step_launch(const BackwardStep& step, const Params& params, std::uint32_t num_ctas) {
  KernelLaunch launch = kernel_launch(step.role, params);
  launch.grid.x = num_ctas;
  launch.num_threads = static_cast<unsigned>(step.spec->num_warps) * 32;
  launch.shared_bytes = static_cast<unsigned>(step.shared_bytes);
  return launch;
}

/// Rows of statistics of one q head of one batch entry, padding included; packed: of one q head.
std::int64_t num_statistics(const GradientProblem& problem);
/// One for each row of all heads.
std::size_t statistics_floats(const GradientProblem& problem);
/// Bytes of the statistics of all rows: two or three floats each.
std::size_t statistics_bytes(const GradientProblem& problem, bool has_origins);

/// `workspace` holds plan.workspace_bytes, aligned to 256: statistics and range tables have their places in it. Grids
/// of steps whose spec is an OwnerSpec are filled.
BackwardLaunch backward_launch(const GradientProblem& problem, const BackwardPlan& plan,
                               const AttentionBackward& args, void* workspace);

}  // namespace fovea::cuda
