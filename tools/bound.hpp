// What this machine can do at most, measured in the same run as what it is compared with.
#pragma once

#include <string>

#include "fovea/runtime.hpp"

namespace fovea::tools {

struct Bounds {
  std::string compute = "fma";  // what the rate was measured of: fp32 multiply-adds in registers
  double compute_gflops = 0;    // all workers
  std::string memory = "read";  // of memory that no cache holds
  double memory_gigabytes = 0;  // a second

  bool are_known() const { return compute_gflops > 0; }
};

/// Takes about a third of a second.
Bounds measure_bounds(Executor& executor);

}  // namespace fovea::tools
