#include <algorithm>
#include <stdexcept>

#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm80/attention_forward.cuh"
#include "sm90/attention_forward.cuh"

// Written by print_forward_units from forward_cases.hpp.
#include "hopper_units.inc"

namespace fovea::cuda {

const EmulatedHopper& hopper_named(std::string_view name) {
  const auto* const found = std::ranges::find(kHoppers, name, &EmulatedHopper::name);
  if (found == std::end(kHoppers)) throw std::out_of_range(std::string(name));
  return *found;
}

}  // namespace fovea::cuda
