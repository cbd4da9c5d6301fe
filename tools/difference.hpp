// A result beside the oracle's, and how far it may be from it: what every --check asks.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/problem.hpp"

namespace fovea::tools {

/// Over all finite elements. Elements that are not finite must be equal (NaN with NaN).
struct Difference {
  double max_error = 0;
  double allowed = 0;      // for the element of max_error
  double relative_l2 = 0;  // |got - expected| / |expected|
  double allowed_relative_l2 = 0;
  std::int64_t num_wrong = 0;  // elements beyond what is allowed
  bool passes() const { return num_wrong == 0 && relative_l2 <= allowed_relative_l2; }
};

struct Values {
  const std::vector<double>& got;
  const std::vector<double>& expected;
  const std::vector<double>& plain;  // of the plain formula in the kernels' dtypes
};

/// Allowed are twice the error of the plain formula, `floor`, and one rounding to `dtype`. The floor is for problems so small
/// that the plain formula may be right by luck.
Difference compare(const Values& values, Dtype dtype, double floor);

/// What one rounding to this dtype may cost; at least the spacing of denormals.
double rounding(Dtype dtype, double value);

Dtype dtype_of_products(ComputeDtype dtype);
/// An input of the products.
float rounded(float value, ComputeDtype dtype);
/// A few roundings of the largest score: the relative error of every probability.
double floor_of_scores(double largest_score);

}  // namespace fovea::tools
