// Problems by other tiles than the table's: what fovea tune may keep. A label that begins with "choice_" names one.
#pragma once

#include <string>
#include <vector>

#include "cuda/forward/attention_forward.hpp"
#include "support/case.hpp"

namespace fovea::testing {

/// Of each kernel, tiles that differ from every tile of the table in something that the kernel's text depends on.
std::vector<Case> sm80_choice_cases();
std::vector<Case> hopper_choice_cases();
std::vector<Case> decode_choice_cases();
/// By the tile of plans in stages, before another kernel is compiled. Labels begin with "quickest_".
std::vector<Case> quickest_cases();

/// The plan of a labelled problem: by the choice that its label names, else by the table; by the kernels for short
/// sequences only where it begins with "short_" or "wgmma_short_".
cuda::ForwardPlan plan_of(const std::string& label, const ForwardProblem& problem,
                          const cuda::DeviceTraits& device);

/// So few SMs that CTAs take several splits each, or all rows of a short sequence.
cuda::DeviceTraits small_hopper();

}  // namespace fovea::testing
