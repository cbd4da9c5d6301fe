// The oracle of gradients: attention_backward, and backward of backward, in fp64. Read
// attention_forward.hpp and softmax.hpp first.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "fovea/backward.hpp"

namespace fovea::reference {

/// Row-major fp64 gradients, each in the shape of what it belongs to: dq as q, dk as k, dv as v.
struct BackwardResult {
  std::vector<double> dq, dk, dv;
  std::vector<double> dsinks;  // [num_heads_q]; empty without sinks
  /// Of every float tensor and float scalar that forward.score captures, by name.
  std::map<std::string, std::vector<double>> dcaptured;
};

/// Reads dout, dlse and the inputs of forward; recomputes out and lse instead of reading them; writes
/// nothing. What shares memory in a view of stride 0 has a gradient for each of its elements.
///
/// With a recipe: of attention without one at the rounded q, k and v (quantized.hpp).
///
/// A row without visible keys passes nothing to q, k and v. If it has a sink, its lse is the sink, so
/// dlse flows to dsinks there as everywhere.
BackwardResult attention_backward(const AttentionBackward& args);

/// Gradients of L = <ddq, dq> + <ddk, dk> + <ddv, dv> + <ddsinks, dsinks> + Σ <ddcaptured, dcaptured>, row-major in the
/// shapes of dout, lse, q, k, v, sinks and what forward.score captures.
struct DoubleBackwardResult {
  std::vector<double> grad_dout, grad_dlse;
  std::vector<double> grad_q, grad_k, grad_v;
  std::vector<double> grad_sinks;  // empty without sinks
  std::map<std::string, std::vector<double>> grad_captured;
};

/// L is also <dout, out'> + <dlse, lse'>, with out' and lse' the tangents of out and lse along (ddq,
/// ddk, ddv, ddsinks, ddcaptured): that is what is differentiated here.
DoubleBackwardResult attention_double_backward(const AttentionDoubleBackward& args);

}  // namespace fovea::reference
