// The problems that attention in four bits is run on under the emulator.
#pragma once

#include <string>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "problem/forward.hpp"
#include "support/case.hpp"

namespace fovea::testing {

/// Each with a label that is a name in C++.
std::vector<Case> fp4_cases();

/// By sm100/attention_fp4 with one group of rows where the label ends in "d64", else two.
cuda::ForwardPlan tensor_memory_fp4_plan(const std::string& label, const ForwardProblem& problem);

/// By sm120/attention_fp4 with 128 rows to a CTA where the label ends in "wide", else 64.
cuda::ForwardPlan fp4_plan(const std::string& label, const ForwardProblem& problem);

}  // namespace fovea::testing
