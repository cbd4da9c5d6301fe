#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/backward_delta.cuh"
#include "kernels/backward/emulated_backward.hpp"
#include "ptx/generated/wgmma_bf16.cuh"
#include "ptx/generated/wgmma_f16.cuh"
#include "sm80/attention_backward.cuh"
#include "sm90/attention_backward_wide.cuh"
#include "sm90/backward/wide/clear_words.cuh"

// Written by print_backward_units from backward_cases.hpp.
#include "wide_backward_units.inc"

namespace fovea::cuda {

const EmulatedWideBackward& wide_backward_named(std::string_view name) {
  const auto* const found = std::ranges::find(kWideBackwards, name, &EmulatedWideBackward::name);
  if (found == std::end(kWideBackwards)) throw std::out_of_range(std::string(name));
  return *found;
}

}  // namespace fovea::cuda
