// A gradient problem, validated, wanted outputs resolved. Backends read this and check nothing.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fovea/backward.hpp"

#include "problem/forward.hpp"

namespace fovea {

/// A captured tensor or scalar of the score program whose gradient is wanted.
struct CapturedGradient {
  std::string name;
  TensorSpec spec;  // of the gradient
  bool is_scalar = false;
};

struct GradientProblem {
  ForwardProblem forward;
  TensorSpec dout;
  TensorSpec dq, dk, dv;  // rank 0: not wanted
  bool has_dlse = false;
  bool wants_dsinks = false;
  std::vector<CapturedGradient> captured{};

  bool wants_dq() const { return dq.rank != 0; }
  bool wants_dk() const { return dk.rank != 0; }
  bool wants_dv() const { return dv.rank != 0; }
};

/// Throws InvalidArgument: "<where>: dq is f32 [2, 3]; expected ...".
GradientProblem validate(const BackwardProblem& problem, std::string_view where);

/// Arguments against the problem that a plan was made for. Throws InvalidArgument before anything is written.
void validate_arguments(const GradientProblem& problem, const AttentionBackward& args,
                        std::string_view where);

/// Arguments of a forward call that lies in the past: out and lse are read, row_max is not looked at.
void validate_past_arguments(const ForwardProblem& problem, const AttentionForward& args,
                             std::string_view where);

/// Everything that a plan depends on, as one number: the key of the plan cache.
expr::Digest problem_key(const BackwardProblem& problem);

/// One line: that of the forward problem, and the gradients.
std::string describe(const GradientProblem& problem);

}  // namespace fovea
