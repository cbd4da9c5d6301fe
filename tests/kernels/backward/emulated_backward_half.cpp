#include "common/backward_delta.cuh"
#include "kernels/backward/emulated_backward.hpp"
#include "sm80/attention_backward.cuh"
#include "sm80/attention_backward_f32.cuh"
#include "sm80/captured_gradients.cuh"

// Written by print_backward_units from backward_cases.hpp.
#include "backward_units_0.inc"

namespace fovea::cuda {

std::span<const EmulatedBackward> half_of_backwards() { return kBackwards; }

}  // namespace fovea::cuda
