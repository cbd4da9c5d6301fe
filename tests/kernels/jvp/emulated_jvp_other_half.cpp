#include "kernels/jvp/emulated_jvp.hpp"
#include "sm80/attention_jvp.cuh"
#include "sm80/attention_jvp_f32.cuh"

// Written by print_jvp_units from jvp_cases.hpp.
#include "jvp_units_1.inc"

namespace fovea::cuda {

std::span<const EmulatedJvp> other_half_of_jvps() { return kJvps; }

}  // namespace fovea::cuda
