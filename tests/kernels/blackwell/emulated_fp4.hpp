// The kernels of fp4_cases.hpp, compiled by the host compiler, by name; and calls by them under the emulator.
#pragma once

#include <string>

#include "fovea/attention.hpp"

#include "cuda/forward/round_to_fp4.hpp"
#include "kernels/emulated_device.hpp"

namespace fovea::testing {

/// The call as the host launches it on a device, by the kernels of this case.
void run_fp4(const std::string& label, const AttentionForward& args, Emulation& emulation);

/// The same on a device whose products read scales out of tensor memory.
void run_tensor_memory_fp4(const std::string& label, const AttentionForward& args,
                           Emulation& emulation);

/// The kernels before attention alone. `workspace` is the emulation's, and stays.
cuda::Fp4RoundingLaunch run_fp4_rounding(const std::string& label, const AttentionForward& args,
                                         Emulation& emulation);
cuda::Fp4RoundingLaunch run_tensor_memory_fp4_rounding(const std::string& label,
                                                       const AttentionForward& args,
                                                       Emulation& emulation);

}  // namespace fovea::testing
