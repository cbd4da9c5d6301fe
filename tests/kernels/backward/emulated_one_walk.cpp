#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/backward_delta.cuh"
#include "kernels/backward/emulated_backward.hpp"
#include "sm80/attention_backward.cuh"
#include "sm80/attention_backward_one_walk.cuh"
#include "sm80/backward/clear_sums.cuh"
#include "sm80/backward/finish_queries.cuh"

// Written by print_backward_units from backward_cases.hpp.
#include "one_walk_units.inc"

namespace fovea::cuda {

const EmulatedOneWalk& one_walk_named(std::string_view name) {
  const auto* const found = std::ranges::find(kOneWalks, name, &EmulatedOneWalk::name);
  if (found == std::end(kOneWalks)) throw std::out_of_range(std::string(name));
  return *found;
}

}  // namespace fovea::cuda
