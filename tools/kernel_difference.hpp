// Two kernels' results of one problem: how far they may be apart.
#pragma once

#include <string>
#include <vector>

#include "fovea/problem.hpp"

namespace fovea::tools {

struct KernelResults {
  std::vector<double> out, lse;
};

/// Why one of two kernels must be wrong; empty: both may be right. Each rounds probabilities and outputs to `dtype`,
/// that of the inputs, so an element is off by no more than two such roundings of the largest value (of v), and all of
/// them together, whose signs differ, by far less: a key too many or too few shows in one or the other. What is not
/// finite must be equal.
std::string why_differs(const KernelResults& got, const KernelResults& expected, Dtype dtype,
                        double largest_value);

/// The same of gradients, each a sum of products with what was rounded to `dtype`: rounding errors have the size of
/// roundings of the sum, whose terms have signs of their own, and of the largest element where an element is small.
std::string why_gradients_differ(const std::vector<std::vector<double>>& got,
                                 const std::vector<std::vector<double>>& expected, Dtype dtype);

}  // namespace fovea::tools
