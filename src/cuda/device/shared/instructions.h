// Which tensor-core GPUs a kernel of mma.sync is written for: what it may multiply by, and how it copies.
#pragma once

#include "shared/types.h"

namespace fovea::cuda {

enum class Instructions : std::uint8_t {
  sm75,  // Turing: mma.m16n8k8 of f16, copies through registers
  sm80,  // and all after it: mma.m16n8k16, cp.async
};

}  // namespace fovea::cuda
