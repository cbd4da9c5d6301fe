// Rows turned by their positions. The meaning stands in fovea/rotary.hpp.
#pragma once

#include "fovea/rotary.hpp"

namespace fovea::cpu {

/// Arguments have been validated. Bound: memory; every element is read and written once.
void rotary(const ApplyRotary& args, Executor& executor);

}  // namespace fovea::cpu
