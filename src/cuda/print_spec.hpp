// The specs of kernels as C++ literals, printed into generated units. Every member is named: nothing is matched by
// position.
#pragma once

#include <string>

#include "cuda/device/shared/forward_spec.h"

namespace fovea::cuda {

/// "ForwardSpec{.element = Element::bf16, ...}".
std::string print_spec(const ForwardSpec& spec);
std::string print_spec(const CombineSpec& spec);

/// "bf16 d128 tile 128x64": for labels and explain.
std::string describe_spec(const ForwardSpec& spec);

}  // namespace fovea::cuda
