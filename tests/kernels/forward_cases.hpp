// The problems that kernels are run on under the emulator: the feature matrix, and what only a kernel's tiles tell apart. A generator
// compiles one kernel for each, so the list is one.
#pragma once

#include <string>
#include <vector>

#include "support/cache_case.hpp"
#include "support/case.hpp"

namespace fovea::testing {

/// Each with a label that is a name in C++.
std::vector<Case> kernel_cases();

struct NamedCacheCase {
  std::string label;
  CacheCase problem;
};
std::vector<NamedCacheCase> kernel_cache_cases();

/// Keys of the longest sequence, which a plan is made for.
std::int64_t longest(const CacheCase& problem);

}  // namespace fovea::testing
