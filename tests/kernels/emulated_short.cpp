#include <algorithm>
#include <stdexcept>

#include "kernels/emulated_forward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm90/attention_forward_short.cuh"

// Written by print_forward_units from hopper_short_cases.cpp.
#include "short_units.inc"

namespace fovea::cuda {

HopperShortFunction hopper_short_named(std::string_view name) {
  const auto* const found = std::ranges::find(kHopperShorts, name, &EmulatedHopperShort::name);
  if (found == std::end(kHopperShorts)) throw std::out_of_range(std::string(name));
  return found->run;
}

}  // namespace fovea::cuda
