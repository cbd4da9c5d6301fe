// Merges partial results row by row. The meaning stands in fovea/state.hpp.
#pragma once

#include <cstddef>

#include "fovea/state.hpp"

namespace fovea::cpu {

/// For so many workers: a row of sums and one converted row each, and a weight for each state.
std::size_t merge_workspace_bytes(const MergeStates& args, int num_workers);

/// Arguments have been validated; `workspace` holds merge_workspace_bytes for the executor's workers, aligned to 64.
void merge_states(const MergeStates& args, std::byte* workspace, Executor& executor);

}  // namespace fovea::cpu
