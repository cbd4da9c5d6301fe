// The formula as a person would code it in the kernels' dtypes: fp32 sums in plain order, no tiles,
// no rescaling. Its error to the oracle is the yardstick of tolerance.hpp; it is never what a
// result is compared with.
#pragma once

#include <vector>

#include "fovea/attention.hpp"

namespace fovea::reference {

/// Layouts of ForwardResult. Inputs of the products, and the weights between them, are
/// of `compute_dtype`.
struct PlainResult {
  std::vector<double> out, lse, row_max;
  double largest_score = 0;  // max |final score| over visible keys
  double largest_average =
      0;  // max over out of Σ weight · |v| : what a relative error of the weights is relative to
};

PlainResult plain_formula(const AttentionForward& args, ComputeDtype compute_dtype);

}  // namespace fovea::reference
