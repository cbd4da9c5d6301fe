// Backward and forward mode as a person would code them in the kernels' dtypes: fp32 sums in plain
// order, no tiles. Their errors to the oracle are the yardsticks of tolerance.hpp.
#pragma once

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"

#include "reference/attention_backward.hpp"
#include "reference/plain_formula.hpp"

namespace fovea::reference {

/// From q, k, v, and out and lse of the plain forward formula, rounded to their dtypes. Inputs of the
/// products, and the weights and score gradients between them, are of their dtype.
struct PlainBackward {
  BackwardResult values;
  /// In the places of the values, sums without cancellation: what a relative error of the scores (and
  /// so of the probabilities), of the products' inputs, and of out is relative to.
  BackwardResult by_scores, by_products, by_out;
  double largest_score = 0;  // max |final score| over visible keys
};
PlainBackward plain_backward(const AttentionBackward& args, const Products& products);

/// Inputs and tangents of the products, and the weights between them, are of their dtype.
struct PlainJvp {
  std::vector<double> out_tangent, lse_tangent;
  std::vector<double> out_by_scores, lse_by_scores;  // as above
  double largest_score = 0;
};
PlainJvp plain_jvp(const AttentionJvp& args, const Products& products);

}  // namespace fovea::reference
