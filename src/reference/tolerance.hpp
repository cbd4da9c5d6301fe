// How far a result may be from the oracle: computed from the problem, in this one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"

#include "reference/attention_backward.hpp"
#include "reference/attention_forward.hpp"
#include "reference/attention_jvp.hpp"

namespace fovea::reference {

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
Tolerances tolerances(const AttentionForward& args, const ForwardResult& expected,
                      ComputeDtype compute_dtype);

/// The same of gradients: names of dcaptured are those of the slots.
struct GradientTolerances {
  Tolerance dq, dk, dv, dsinks;
  std::map<std::string, Tolerance> dcaptured;
};
GradientTolerances tolerances(const AttentionBackward& args, const BackwardResult& expected,
                              ComputeDtype compute_dtype);

/// The same of forward mode, whose products are f32.
struct JvpTolerances {
  Tolerances forward;
  Tolerance out_tangent, lse_tangent;
};
JvpTolerances tolerances(const AttentionJvp& args, const JvpResult& expected);

/// A result beside the oracle's, over all elements.
struct Comparison {
  std::size_t worst =
      0;  // the element that is furthest beyond what it may err by, or nearest to it
  std::size_t largest = 0;     // the one of the largest error
  std::int64_t num_wrong = 0;  // elements beyond what they may err by
  double norm = 0;             // of the errors of finite elements
  double expected_norm = 0;

  bool passes(const Tolerance& tolerance) const { return num_wrong == 0 && norm <= tolerance.norm; }
};

/// Both row-major. Elements that are not finite must be equal (NaN with NaN).
Comparison compare(const std::vector<double>& got, const std::vector<double>& expected,
                   const Tolerance& tolerance);

}  // namespace fovea::reference
