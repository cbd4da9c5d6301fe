// Problems of forward mode for the kernels of GPUs. Each has a label that is a name in C++.
#pragma once

#include <vector>

#include "support/gradient_case.hpp"

namespace fovea::testing {

/// The feature matrix in bf16 and in f32, tiles of all widths with tails, packed sequences of all lengths, formulas of
/// captured data that moves, NaN in sight and out of it.
std::vector<GradientCase> jvp_cases();

/// Products of the kernel that runs it.
ComputeDtype products_of(const GradientCase& problem);

}  // namespace fovea::testing
