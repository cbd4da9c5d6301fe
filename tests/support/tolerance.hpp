// How far a result may be from the oracle: computed from the problem, in this one place.
#pragma once

#include <vector>

#include "fovea/attention.hpp"

#include "reference/attention_forward.hpp"

namespace fovea::testing {

/// Of one output. An element may err by `absolute` plus one rounding to `dtype`; all of them
/// together, as the Euclidean norm, by `norm`, roundings included.
struct Tolerance {
  Dtype dtype = Dtype::f32;
  double absolute = 0;
  double norm = 0;
  double plain_absolute = 0,
         plain_norm = 0;  // errors of the plain formula, for tests that print or compare them

  double allowed(double expected) const;
};

/// Half a unit in the last place of `value` in this dtype: what one rounding may cost.
double rounding(Dtype dtype, double value);

/// What a result may err by even where the plain formula is right by luck.
struct Floor {
  double absolute = 0;
  double norm = 0;
};

/// Twice the error of `plain`, plus one rounding to `dtype`, plus the floor. Both row-major.
Tolerance tolerance(const std::vector<double>& plain, const std::vector<double>& expected,
                    Dtype dtype, const Floor& floor);

struct Tolerances {
  Tolerance out, lse, row_max;
};

/// Twice the error of the plain formula in `compute_dtype`, plus one rounding of the output, plus a
/// floor (see .cpp).
Tolerances tolerances(const AttentionForward& args, const reference::ForwardResult& expected,
                      ComputeDtype compute_dtype);

}  // namespace fovea::testing
