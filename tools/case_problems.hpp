// The problems that a case poses, by shapes alone: what fovea pack compiles kernels for.
#pragma once

#include <vector>

#include "fovea/backward.hpp"

#include "cases.hpp"
#include "problem/backward.hpp"
#include "problem/forward.hpp"

namespace fovea::tools {

struct CaseProblems {
  std::vector<ForwardProblem> forward;    // two where sequences share their first keys
  std::vector<GradientProblem> backward;  // one, of a case of backward
};

/// `inputs`: make_shapes of the case. Gradients are of a call with lse: of such a case, nothing without.
CaseProblems problems_of_case(const Case& named, const Inputs& inputs, bool wants_lse);

/// Gradients of q, k and v, and of sinks where there are some, in the dtypes of their tensors; dout as out.
BackwardProblem gradients_of(const Problem& problem);

}  // namespace fovea::tools
