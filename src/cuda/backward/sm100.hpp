// What Blackwell's backward kernel needs on the host: its choice; all that comes around it is Hopper's. Read
// candidates.hpp for the table that it is a row of, device/sm100/attention_backward.cuh for the kernel.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/backward/candidates.hpp"
#include "cuda/backward/sm90.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm100Backward {
  static constexpr std::string_view kName = "cuda/sm100/attention_backward";
  static constexpr std::string_view kHeader = "sm100/attention_backward.cuh";
  static constexpr std::string_view kEntry = "sm100::attention_backward";
  static constexpr std::string_view kParams = "Sm90BackwardParams";
  static constexpr bool kIsChained = true;

  static constexpr auto has_origins = Sm90Backward::has_origins;
  static std::optional<Refusal> refuses(const GradientProblem& problem, const DeviceTraits& device);
  /// As Sm90Backward::choose; pairs are never left in memory.
  static std::vector<BackwardStep> choose(const GradientProblem& problem,
                                          const DeviceTraits& device);
  static constexpr auto scratch_bytes = Sm90Backward::scratch_bytes;
  static constexpr auto prepare = Sm90Backward::prepare;
};

}  // namespace fovea::cuda
