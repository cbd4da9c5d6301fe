// Attention forward on the CPU by a recipe. The operands are rounded first (operands.hpp); then the rows of each kv
// head walk, a panel at a time, over tiles of block_kv keys with the f32 kernels of attention_forward:
//
//   S = codes(K) codes(Q)ᵀ;  S = S · scales + shift;  S = program(S);  S = mask(S)
//   P = codes of the softmax (probabilities.hpp);  O = O · rescale + weight · scales of V · (codes(V)ᵀ P)
//
// Sums of codes are exact in f32 where both are int8. This is the plain path: right with every feature of a forward
// call, at the speed of f32 products and below it; no instructions of eight bits.
#pragma once

#include <cstddef>
#include <string_view>

#include "fovea/attention.hpp"

#include "cpu/attention_forward.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

inline constexpr std::string_view kQuantizedCandidate = "cpu/attention_quantized";

/// The kernel of a problem that has a recipe, with its workspace; refused where the processor or the caller's target
/// cannot: then the plan's candidate is empty.
ForwardPlan try_plan_quantized(const ForwardProblem& problem, int num_threads);

void attention_quantized(const ForwardProblem& problem, const ForwardPlan& plan,
                         const AttentionForward& args, std::byte* workspace, Executor& executor);

}  // namespace fovea::cpu
