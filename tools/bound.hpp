// What this machine can do at most, measured in the same run as what it is compared with.
#pragma once

#include "fovea/runtime.hpp"

namespace fovea::tools {

struct Bounds {
  double fma_gflops = 0;      // fp32 multiply-adds in registers, all workers
  double read_gigabytes = 0;  // a second, of memory that no cache holds
};

/// Takes about a third of a second.
Bounds measure_bounds(Executor& executor);

}  // namespace fovea::tools
