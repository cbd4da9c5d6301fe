// Validation of forward mode: tangents beside a forward problem that has been validated.
#pragma once

#include <string_view>

#include "fovea/jvp.hpp"

#include "problem/forward.hpp"

namespace fovea {

/// Throws InvalidArgument before anything is written.
void validate_arguments(const ForwardProblem& problem, const AttentionJvp& args,
                        std::string_view where);

}  // namespace fovea
