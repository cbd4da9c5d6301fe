// Gradients of gradients on the CPU, by the plain formula. The meaning stands in fovea/backward.hpp.
#pragma once

#include "fovea/backward.hpp"

#include "problem/forward.hpp"

namespace fovea::cpu {

/// Arguments have been validated; `problem` is that of args.backward.forward.
void attention_double_backward(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                               Executor& executor);

}  // namespace fovea::cpu
