// The kernels of jvp_cases.hpp, compiled by the host compiler, by name; and a call by them under the emulator.
#pragma once

#include <span>
#include <string_view>

#include "fovea/jvp.hpp"

#include "cuda/device/shared/jvp_params.h"
#include "kernels/emulated_device.hpp"

namespace fovea::cuda {

struct EmulatedJvp {
  std::string_view name;
  void (*main)(const JvpParams& params);
};

std::span<const EmulatedJvp> half_of_jvps();
std::span<const EmulatedJvp> other_half_of_jvps();

}  // namespace fovea::cuda

namespace fovea::testing {

/// The call as the host launches it on a device, by the kernel of this case.
void run_jvp(std::string_view label, const AttentionJvp& args, Emulation& emulation);

}  // namespace fovea::testing
