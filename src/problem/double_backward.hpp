// Validation of gradients of gradients.
#pragma once

#include <string_view>

#include "fovea/backward.hpp"

#include "problem/forward.hpp"

namespace fovea {

/// `problem` is that of args.backward.forward, validated. Throws InvalidArgument before anything is written.
void validate_arguments(const ForwardProblem& problem, const AttentionDoubleBackward& args,
                        std::string_view where);

}  // namespace fovea
