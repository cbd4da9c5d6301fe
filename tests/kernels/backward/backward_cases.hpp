// Problems of gradients for the kernels of GPUs. Each has a label that is a name in C++.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/backward/attention_backward.hpp"
#include "problem/backward.hpp"
#include "support/gradient_case.hpp"

namespace fovea::testing {

/// The feature matrix in bf16 and in f32, tiles with tails, packed sequences of all lengths; behind them
/// captured_cases().
std::vector<GradientCase> backward_cases();

/// What programs capture, in every order in which its elements are read.
std::vector<GradientCase> captured_cases();

/// Whose kernels run a case: those of Turing where its label says so, else of an sm_80.
cuda::DeviceTraits device_of(const std::string& label);
/// Their plan there, where each gradient has an owner: no one walk.
cuda::BackwardPlan plan_of_owners(const GradientProblem& problem, const cuda::DeviceTraits& device);

/// What sm90/attention_backward takes: its tiles and their tails, masks, groups of heads, packed sequences, dtypes and
/// layouts of gradients.
std::vector<GradientCase> hopper_backward_cases();
/// What sm90/attention_backward_wide takes: the same of head dims above 128.
std::vector<GradientCase> wide_backward_cases();
/// What sm80/attention_backward_one_walk takes: of those of Hopper, every tile, mask, program and dtype. Head dims
/// above 128 have no turns.
std::vector<GradientCase> one_walk_cases();
/// What sm100/attention_backward takes: of those of Hopper, each feature once.
std::vector<GradientCase> blackwell_backward_cases();
/// Those that every run of the tests takes.
bool is_short_blackwell_backward(std::string_view label);
/// By that kernel. Of labels that end in "awaiting" dq waits for dk's operand, over which it lies.
cuda::BackwardPlan blackwell_backward_plan(const std::string& label,
                                           const GradientProblem& problem);
/// May dq of a case be summed in any order? Those whose label says so.
bool is_in_any_order(const GradientCase& problem);

/// The case of this label.
GradientCase backward_case(const std::string& label);

}  // namespace fovea::testing
