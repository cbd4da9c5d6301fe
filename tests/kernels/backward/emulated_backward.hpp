// The kernels of backward_cases.hpp, compiled by the host compiler, by name; and a call by them under the emulator.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "fovea/backward.hpp"

#include "cuda/backward/attention_backward.hpp"
#include "cuda/device/shared/backward_params.h"
#include "kernels/emulated_device.hpp"

namespace fovea::cuda {

struct EmulatedBackward {
  std::string_view name;
  void (*delta)(const BackwardParams& params);
  void (*steps[3])(const BackwardParams& params);
};

std::span<const EmulatedBackward> half_of_backwards();
std::span<const EmulatedBackward> other_half_of_backwards();

}  // namespace fovea::cuda

namespace fovea::testing {

/// The call as the host launches it on a device, by the kernels of this case.
void run_backward(const std::string& label, const AttentionBackward& args, Emulation& emulation);

}  // namespace fovea::testing
