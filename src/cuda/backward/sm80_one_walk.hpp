// sm80/attention_backward_one_walk on the host: what it takes, its tiles, its memory, its launches. Read candidates.hpp
// for the table that it is a row of, device/sm80/attention_backward_one_walk.cuh for the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/device/shared/backward_params_sm80.h"

namespace fovea::cuda {

/// A call's parameters and grids.
struct Sm80OneWalkLaunch {
  BackwardLaunch common{};
  Sm80OneWalkParams params{};
  ClearSumsParams clear{};
  std::uint32_t num_clear_ctas = 0, num_ctas = 0, num_finish_ctas = 0;
  RedoLaunches redo{};

  /// Statistics of rows, zeros, the walk, dq, tiles again, captured data, dsinks.
  KernelLaunches launches(const BackwardPlan& plan) const;

  /// What computes tiles again. After all else of params.
  void prepare_redo(const BackwardPlan& plan);
};

/// A row of the table of candidates.
struct Sm80OneWalk {
  static constexpr std::string_view kName = "cuda/sm80/attention_backward_one_walk";
  static constexpr std::string_view kHeader = "sm80/attention_backward_one_walk.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_backward_one_walk";
  static constexpr std::string_view kParams = "Sm80OneWalkParams";
  static constexpr bool kIsChained = false;

  static bool has_origins(const GradientProblem& problem) { return has_program(problem); }
  static std::optional<Refusal> refuses(const GradientProblem& problem, const DeviceTraits& device);
  /// The walk, what zeroes its sums and what makes dq of them; where NaN or infinity in hidden or dropped pairs may
  /// have reached gradients, what computes tiles again.
  static std::vector<BackwardStep> choose(const GradientProblem& problem,
                                          const DeviceTraits& device);
  static std::vector<std::vector<BackwardStep>> alternatives(const GradientProblem& problem,
                                                             const DeviceTraits& device);
  /// f32 sums of dq, progress, tiles to be computed again.
  static std::size_t scratch_bytes(const std::vector<BackwardStep>& steps,
                                   const GradientProblem& problem);
  static Sm80OneWalkLaunch prepare(const GradientProblem& problem, const BackwardPlan& plan,
                                   const AttentionBackward& args, void* workspace);
};

}  // namespace fovea::cuda
