// Short sequences on Hopper by sm80/attention_forward: the keys of a sequence lie in shared memory as a whole, rows are
// 16 a warp, and an SM has several CTAs. The kernel's code is as for long ones: read sm80.hpp for it, and for the bound
// docs/kernels/attention_short_sm90.md.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "cuda/forward/sm80.hpp"

namespace fovea::cuda {

/// A row of the table of candidates.
struct Sm80ForwardShort : Sm80Forward {
  static constexpr std::string_view kName = "cuda/sm80/attention_forward_short";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
};

}  // namespace fovea::cuda
