// The problems that kernels are run on under the emulator: the feature matrix, and what only a kernel's tiles tell apart. A generator
// compiles one kernel for each, so the list is one.
#pragma once

#include <string>
#include <vector>

#include "support/case.hpp"

namespace fovea::testing {

/// Each with a label that is a name in C++.
std::vector<Case> kernel_cases();

}  // namespace fovea::testing
