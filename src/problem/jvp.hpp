// A forward-mode problem, validated. Backends read this and check nothing.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/jvp.hpp"

#include "problem/forward.hpp"

namespace fovea {

struct TangentProblem {
  ForwardProblem forward;
  JvpProblem posed;  // which tangents there are, and their dtypes
};

/// Throws InvalidArgument: "<where>: k_tangent is f32 [2, 3]; expected ...".
TangentProblem validate(const JvpProblem& problem, std::string_view where);

/// Arguments against the problem that a plan was made for. Throws InvalidArgument before anything is written.
void validate_arguments(const TangentProblem& problem, const AttentionJvp& args,
                        std::string_view where);

/// Everything that a plan depends on, as one number: the key of the plan cache.
expr::Digest problem_key(const JvpProblem& problem);

/// Tangents of captured data, as tensors without memory.
std::vector<CapturedTensor> captured_tangents_of(const JvpProblem& problem);

/// Captures of the score program, and behind them the tangents by the names that derivatives read them by
/// (expr/differentiate.hpp: tangent_slots).
Captures captures_with_tangents(const ScoreMod& score, const std::vector<std::string>& slots,
                                const std::vector<CapturedTensor>& tangents);

/// One line: that of the forward problem, and what moves.
std::string describe(const TangentProblem& problem);

}  // namespace fovea
