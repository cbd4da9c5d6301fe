// What rounds operands before gradients, compiled by the host compiler, and launched under the emulator.
#pragma once

#include <cstddef>

#include "cuda/backward/rounded.hpp"
#include "kernels/emulated_device.hpp"

namespace fovea::testing {

/// Into workspace of so many bytes; the call's tensors and it are registered here.
void run_rounding(const cuda::RoundedCall& call, const AttentionForward& args, std::byte* workspace,
                  std::size_t bytes, Emulation& emulation);

}  // namespace fovea::testing
