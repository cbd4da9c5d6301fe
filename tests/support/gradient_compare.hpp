// The comparisons that every implementation of gradients goes through: backward and forward mode
// against the oracle.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/gradient_case.hpp"

namespace fovea::testing {

/// Targets that have gradients of inputs of this dtype here.
std::vector<CpuTarget> gradient_targets_for(Dtype dtype);

struct BackwardCompareOptions {
  std::vector<CpuTarget> targets{};  // default: all that run this here, and automatic
  Executor* executor = nullptr;
  /// What is tested; it finds out and lse of the plain formula, and is judged as a kernel of these
  /// products, probabilities and their gradients rounded likewise. Default: attention_forward, then
  /// attention_backward with a workspace full of NaN.
  std::function<void(const AttentionBackward&)> run{};
  ComputeDtype products = ComputeDtype::f32;
};

/// Empty when dq, dk, dv, dsinks and dcaptured are right on every target, inputs (out and lse among
/// them) are unchanged and guards untouched. Otherwise as difference_from_oracle in compare.hpp.
std::string backward_difference(const GradientCase& problem,
                                const BackwardCompareOptions& options = {});

/// The same of forward mode: out, lse and their tangents. `run` is what is tested, a kernel of these
/// products; by default attention_jvp on every target.
std::string jvp_difference(const GradientCase& problem,
                           const std::function<void(const AttentionJvp&)>& run = {},
                           ComputeDtype products_of_run = ComputeDtype::f32);

}  // namespace fovea::testing
