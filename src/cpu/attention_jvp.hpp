// Forward mode on the CPU. The meaning stands in fovea/jvp.hpp.
#pragma once

#include "fovea/jvp.hpp"

#include "problem/forward.hpp"

namespace fovea::cpu {

/// Arguments have been validated. Plans, allocates O(threads · tile) and runs.
void attention_jvp(const ForwardProblem& problem, const AttentionJvp& args, Executor& executor);

}  // namespace fovea::cpu
