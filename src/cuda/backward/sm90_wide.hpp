// What Hopper's backward kernels of head dims above 128 need on the host: their choice, tensor maps, launches. Read
// candidates.hpp for the table that they are a row of, device/sm90/attention_backward_wide.cuh for the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/device/shared/backward_params_sm90_wide.h"
#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {

/// A call's parameters and grids; where they run is not known here.
struct Sm90WideBackwardLaunch {
  BackwardLaunch common{};
  Sm90WideBackwardParams params{};
  ClearWordsParams clear{};
  std::uint32_t num_clear_ctas = 0;  // 0: no tile is ever computed again
  RedoLaunches redo{};

  /// Statistics of rows, words, dk and dv, dq, tiles again, dsinks.
  KernelLaunches launches(const BackwardPlan& plan) const;

  /// What computes tiles again. After all else of params.
  void prepare_redo(const BackwardPlan& plan);
};

/// A row of the table of candidates.
struct Sm90WideBackward {
  static constexpr std::string_view kName = "cuda/sm90/attention_backward_wide";
  static constexpr std::string_view kHeader = "sm90/attention_backward_wide.cuh";
  static constexpr std::string_view kEntry = "sm90::attention_backward_wide";
  static constexpr std::string_view kParams = "Sm90WideBackwardParams";
  static constexpr bool kIsChained = true;

  static bool has_origins(const GradientProblem& problem) { return has_program(problem); }
  static std::optional<Refusal> refuses(const GradientProblem& problem, const DeviceTraits& device);
  /// A walk for dk and dv, one for dq; where NaN or infinity in hidden or dropped pairs may reach them, what clears the
  /// words of tiles and what computes tiles again.
  static std::vector<BackwardStep> choose(const GradientProblem& problem,
                                          const DeviceTraits& device);
  /// Tiles to be computed again.
  static std::size_t scratch_bytes(const std::vector<BackwardStep>& steps,
                                   const GradientProblem& problem);
  /// Of tensors that TMA reads. `workspace` holds plan.workspace_bytes.
  static Sm90WideBackwardLaunch prepare(const GradientProblem& problem, const BackwardPlan& plan,
                                        const AttentionBackward& args, void* workspace,
                                        const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
