// Probabilities on the CPU, by the plain formula. The meaning stands in fovea/probabilities.hpp.
#pragma once

#include "fovea/probabilities.hpp"

#include "problem/forward.hpp"

namespace fovea::cpu {

/// Arguments have been validated; `problem` is that of args.forward.
void attention_probabilities(const ForwardProblem& problem, const AttentionProbabilities& args,
                             Executor& executor);

}  // namespace fovea::cpu
