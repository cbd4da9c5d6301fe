// Head dims above 256 by sm80/attention_forward: a launch for each part of V's columns, whose sums a warp's registers
// hold. Each computes the scores again, which is what that costs: keys of 576 and values of 512, in two parts, are 1.53
// times the products. The kernel's code is as for narrow heads: read sm80.hpp for it, and for the bound
// docs/kernels/attention_forward_sm80.md, "Wide heads".
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/forward/sm80.hpp"

namespace fovea::cuda {

/// A call: launches that differ in the columns of v and of out that they have.
struct WideLaunch {
  static constexpr int kMostParts = 3;  // head_dim_v of 576

  std::array<ForwardLaunch, kMostParts> parts{};
  int num_parts = 0;

  KernelLaunches launches(const ForwardPlan& plan) const;
};

/// A row of the table of candidates. Its spec's head_dim_v is a part's.
struct Sm80ForwardWide : Sm80Forward {
  static constexpr std::string_view kName = "cuda/sm80/attention_forward_wide";

  static std::optional<Refusal> refuses(const ForwardProblem& problem, const DeviceTraits& device);
  static Spec choose(const ForwardProblem& problem, const DeviceTraits& device);
  static std::vector<Spec> alternatives(const ForwardProblem& problem, const DeviceTraits& device);
  static WideLaunch prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                            const AttentionForward& args, const GrownCache* cache, void* workspace,
                            const TensorMapEncoder& encode);
};

}  // namespace fovea::cuda
