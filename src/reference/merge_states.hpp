// The oracle of merging partial results, in fp64.
#pragma once

#include <vector>

#include "fovea/state.hpp"

namespace fovea::reference {

/// Row-major: out in the shape of the states' outs, lse in that of their lses.
struct MergedState {
  std::vector<double> out;
  std::vector<double> lse;
};

/// Shapes are those of args.out and its heads and rows; writes nothing.
MergedState merge_states(const MergeStates& args);

}  // namespace fovea::reference
