// The oracle of recipes: what every field of a Quantization means, step by step. Codes and scales are those of f32
// arithmetic, which kernels can meet bit for bit; all else is fp64. Shares with src/quant which
// rows have a scale in common or are in the sample, and the signs of the rotation; no number.
//
// Of one sequence, query head and its kv head:
//   k' = k - mean(k)      q' = q - mean of its block       then both rotated
//   s_ij = scale (round(q')_i · round(k')_j  +  mean of i's block · (k - mean(k))_j  +  q_i · mean(k))
//   f_ij = mask(score(s_ij)), so that programs, sinks and lse see the scores of the problem
//   p_ij = code of 2^(f_ij - reference), tile by tile of block_kv keys; of e2m1: times the scale of its group of keys
//   out_i = (Σ_j p_ij round(v - mean(v))_j  +  mean(v) Σ_j p_ij) / (sink + Σ_j p_ij)
//
// A row of q or k that holds a value that is not finite is not rounded: its scores are q · k, and for means and scales
// it is a row of zeros. Such a value of v is itself, and 0 for them.
//
// q, k and v may be codes of e4m3 by scales of the call: their numbers are codes times scales, and nothing is rounded.
#pragma once

#include <span>
#include <vector>

#include "fovea/attention.hpp"

#include "reference/attention_forward.hpp"
#include "reference/head_rows.hpp"

namespace fovea::reference {

/// args.quant is not none.
ForwardResult quantized_forward(const AttentionForward& args);

/// q, k and v as a recipe rounds them: sums of a rounded row and its mean, turned back.
struct RoundedOperands {
  HeadRows q, k, v;
};
RoundedOperands rounded_operands(const AttentionForward& args);

/// The nearest number of e4m3, ties to even, at most 448 in magnitude.
double nearest_e4m3(double value);

/// Numbers that share a scale of e4m3 (group_16) or a power of two (group_32), as e2m1 has them.
std::vector<double> rounded_group(std::span<const float> group, ScaleGranularity groups);

}  // namespace fovea::reference
