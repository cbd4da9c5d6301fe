// Gradients of attention by a recipe: those of attention without one at the rounded q, k and v. Rounding is passed
// straight through, so that what is a gradient of a rounded number is that of the number.
//
// The operands are rounded as for forward, and become numbers again, in f32: round(q - mean) + mean, turned back
// where the recipe rotates, and k likewise. Scores are products of these, which differ from forward's by a number of
// the row and, for programs that see it and for block means of q, by less than a rounding; so lse is computed anew from
// them rather than read, and so is out. All products are those of the f32 kernels.
#pragma once

#include <cstddef>

#include "fovea/backward.hpp"

#include "cpu/attention_backward.hpp"
#include "cpu/attention_forward.hpp"
#include "problem/backward.hpp"

namespace fovea::cpu {

/// What a plan of gradients has where there is a recipe: the problem without it, over f32 tensors in workspace.
struct RoundedGradients {
  GradientProblem problem;
  ForwardPlan forward;
  BackwardPlan backward;
};

/// As try_plan_backward, of a problem that has a recipe.
BackwardPlan try_plan_quantized_backward(const GradientProblem& problem, int num_threads);

/// Arguments have been validated; the plan has `rounded`.
void attention_quantized_backward(const GradientProblem& problem, const BackwardPlan& plan,
                                  const AttentionBackward& args, std::byte* workspace,
                                  Executor& executor);

}  // namespace fovea::cpu
