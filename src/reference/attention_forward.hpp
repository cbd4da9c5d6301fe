// The oracle: attention in fp64, written to be read. It defines every meaning and borrows no code
// from the fast paths; formulas go through its own evaluator (evaluate.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

namespace fovea::reference {

/// Row-major fp64 results whatever the strides of the views: out [batch, seqlen_q, num_heads_q,
/// head_dim_v] or packed [total_q, num_heads_q, head_dim_v]; lse and row_max [batch, num_heads_q,
/// seqlen_q] or [num_heads_q, total_q].
struct ForwardResult {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<double> row_max;
};

/// Reads q, k, v, score, mask, softmax_scale, sinks, dropout, quant and its scales, and cu_seqlens of
/// `args`; writes nothing of it. With a recipe: read quantized.hpp.
ForwardResult attention_forward(const AttentionForward& args);

}  // namespace fovea::reference
