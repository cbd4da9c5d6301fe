// Attention forward on the CPU by a recipe. The operands are rounded first (operands.hpp); then the rows of each kv
// head walk, a panel at a time, over tiles of block_kv keys (walk.hpp):
//
//   S = codes(K) codes(Q)ᵀ;  S = S · scales + shift;  S = program(S);  S = mask(S)
//   P = codes of the softmax;  O = O · rescale + weight · scales of V · (codes(V)ᵀ P)
//
// Products of int8 codes are exact sums of integers where the processor multiplies eight bits (kernels/codes.hpp); all
// else goes through the kernels of attention_forward's panels, in bf16 where that is exact or the inputs are bf16, in
// f32 elsewhere. f32 holds sums of int8 products exactly too, so that without such instructions nothing differs but
// speed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "fovea/attention.hpp"

#include "cpu/attention_forward.hpp"
#include "problem/forward.hpp"

namespace fovea::cpu {

inline constexpr std::string_view kQuantizedCandidate = "cpu/attention_quantized";

/// The kernel of a problem that has a recipe, with its workspace; refused where the processor or the caller's target
/// cannot: then the plan's candidate is empty.
ForwardPlan try_plan_quantized(const ForwardProblem& problem, int num_threads);

/// The target in f32 with the vectors of this one; `automatic` stays.
CpuTarget f32_target(CpuTarget target);

/// Whether both products of a recipe's plan are of eight bits, outside AMX's pipeline of 16 bits, which is faster.
bool has_fastest_products(const ForwardPlan& plan, const Quantization& quant);

/// What the plan of a recipe multiplies: "int8", "int8 and bf16", "f32".
std::string quantized_products(const ForwardPlan& plan, const Quantization& quant);

void attention_quantized(const ForwardProblem& problem, const ForwardPlan& plan,
                         const AttentionForward& args, std::byte* workspace, Executor& executor);

}  // namespace fovea::cpu
