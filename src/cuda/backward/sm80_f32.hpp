// sm80/attention_backward_f32 on the host: what it takes, its tiles, its parameters. Read candidates.hpp for the table
// that it is a row of, device/sm80/attention_backward_f32.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/backward/launch.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm80BackwardF32 {
  static constexpr std::string_view kName = "cuda/sm80/attention_backward_f32";
  static constexpr std::string_view kHeader = "sm80/attention_backward_f32.cuh";
  static constexpr std::string_view kEntry = "sm80::attention_backward_f32";
  static constexpr std::string_view kParams = "BackwardParams";
  static constexpr bool kIsChained = false;

  static bool has_origins(const GradientProblem&) { return true; }
  static std::optional<Refusal> refuses(const GradientProblem& problem, const DeviceTraits& device);
  static std::vector<BackwardStep> choose(const GradientProblem& problem,
                                          const DeviceTraits& device);
  static std::vector<std::vector<BackwardStep>> alternatives(const GradientProblem& problem,
                                                             const DeviceTraits& device);
  static std::size_t scratch_bytes(const std::vector<BackwardStep>&, const GradientProblem&) {
    return 0;
  }
  static BackwardLaunch prepare(const GradientProblem& problem, const BackwardPlan& plan,
                                const AttentionBackward& args, void* workspace) {
    return backward_launch(problem, plan, args, workspace);
  }
};

}  // namespace fovea::cuda
