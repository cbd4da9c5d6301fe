// Where a tensor lies, asked.
#pragma once

#include "fovea/tensor.hpp"

namespace fovea {

inline bool is_cpu(Device device) { return device.kind == Device::Kind::cpu; }

}  // namespace fovea
