// The kernels of blackwell_cases.hpp, compiled by the host compiler, by name; and a call by them under the emulator.
#pragma once

#include "kernels/run.hpp"

namespace fovea::testing {

/// The call as the host launches it on a device, by the kernel of this case.
void run_blackwell(const Run& run, Emulation& emulation);

}  // namespace fovea::testing
