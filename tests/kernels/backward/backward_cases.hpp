// Problems of gradients for the kernels of GPUs. Each has a label that is a name in C++.
#pragma once

#include <string>
#include <vector>

#include "support/gradient_case.hpp"

namespace fovea::testing {

/// The feature matrix in bf16 and in f32, tiles with tails, packed sequences of all lengths. No gradient of what a
/// program captures: no kernel of a GPU sums one.
std::vector<GradientCase> backward_cases();

/// The case of this label.
GradientCase backward_case(const std::string& label);

}  // namespace fovea::testing
