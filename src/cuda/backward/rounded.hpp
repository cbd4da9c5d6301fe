// Gradients of attention by a recipe: those of attention without one at the rounded q, k and v. Rounding is passed
// straight through, so that what is a gradient of a rounded number is that of the number.
//
//   key_mean, quantize   q and k, and v where the recipe has codes of it, become the numbers that their codes stand
//                        for, elements of the call's dtype in workspace
//   forward              out and lse at these numbers, by a kernel without a recipe
//   the plan's steps     as without a recipe, at these numbers, out and lse
//
// out and lse are computed anew, for ds = p (dp - delta) sums to 0 over a row only where p and delta are of the same
// scores and values: what is left over is multiplied by all that keys have in common. Those of `fast` are of other
// probabilities, and k is rounded once more here, from f32 to elements, which a bias of keys makes coarse.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

#include "fovea/backward.hpp"

#include "cuda/backward/attention_backward.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "problem/backward.hpp"

namespace fovea::cuda {

/// What rounds, as refusals and explain name it.
inline constexpr std::string_view kRoundingName = "cuda/quantize_kv";

/// What a plan of gradients has where there is a recipe.
struct RoundedGradients {
  GradientProblem problem;  // without the recipe, over tensors in workspace
  QuantizeKvSpec spec;
  ForwardPlan forward{};
  // In workspace, behind what forward takes, and then the plan's steps.
  std::size_t numbers_at = 0, out_at = 0, lse_at = 0;
};

/// Recipes and problems whose operands are not rounded here.
std::optional<Refusal> refuses_rounding(const ForwardProblem& problem, const DeviceTraits& device);

/// Of a problem that has a recipe and is not refused; forward is to be chosen, places to be found.
RoundedGradients rounded_gradients(const GradientProblem& problem);

/// Finds the places; returns the bytes of workspace with `steps_bytes` of the plan's steps.
std::size_t place_rounded(const GradientProblem& problem, std::size_t steps_bytes,
                          RoundedGradients& rounded);

/// A call: what rounds, then the call without a recipe, whose forward is still to be computed.
struct RoundedCall {
  QuantizeKvLaunch rounding;
  AttentionBackward args;

  KernelLaunches launches() const;
};
RoundedCall rounded_call(const GradientProblem& problem, const BackwardPlan& plan,
                         const AttentionBackward& args, void* workspace);

/// Enqueues all three; the plan has `rounded`.
void attention_rounded_backward(const GradientProblem& problem, const BackwardPlan& plan,
                                const AttentionBackward& args, void* workspace, void* stream);

}  // namespace fovea::cuda
