// Merges partial results row by row. The meaning stands in fovea/state.hpp.
#pragma once

#include "fovea/state.hpp"

namespace fovea::cpu {

/// Arguments have been validated.
void merge_states(const MergeStates& args, Executor& executor);

}  // namespace fovea::cpu
