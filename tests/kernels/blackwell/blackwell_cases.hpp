// The problems that Blackwell's forward kernel is run on under the emulator: those of Hopper's that it takes, few rows
// and caches among them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "kernels/forward_cases.hpp"
#include "problem/forward.hpp"

namespace fovea::testing {

/// Each with a label that is a name in C++.
std::vector<Case> blackwell_cases();

std::vector<NamedCacheCase> blackwell_cache_cases();

/// Those that every run of the tests takes: each feature once.
bool is_short_blackwell(std::string_view label);

/// One SM, so that row tiles follow each other; of packed sequences two, which claim row tiles from each other. The L2
/// cache is so small that heads come in several sections.
cuda::DeviceTraits small_blackwell(const ForwardProblem& problem, int minor);

/// By sm100/attention_forward. Labels that end in "awaiting" have scores wait for the sums whose P they overwrite,
/// those with "_103_" are for sm_103.
cuda::ForwardPlan blackwell_plan(const std::string& label, const ForwardProblem& problem);

}  // namespace fovea::testing
