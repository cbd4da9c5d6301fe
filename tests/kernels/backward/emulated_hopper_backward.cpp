#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/backward_delta.cuh"
#include "kernels/backward/emulated_backward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm80/attention_backward.cuh"
#include "sm80/captured_gradients.cuh"
#include "sm90/attention_backward.cuh"
#include "sm90/backward/finish_queries.cuh"
#include "sm90/backward/prepare_rows.cuh"
#include "sm90/backward/sum_pairs.cuh"

// Written by print_backward_units from backward_cases.hpp.
#include "hopper_backward_units.inc"

namespace fovea::cuda {

const EmulatedHopperBackward& hopper_backward_named(std::string_view name) {
  const auto* const found =
      std::ranges::find(kHopperBackwards, name, &EmulatedHopperBackward::name);
  if (found == std::end(kHopperBackwards)) throw std::out_of_range(std::string(name));
  return *found;
}

}  // namespace fovea::cuda
