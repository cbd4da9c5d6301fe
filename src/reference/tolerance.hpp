// How far a result may be from the oracle: computed from the problem, in this one place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"
#include "fovea/jvp.hpp"

#include "reference/attention_backward.hpp"
#include "reference/attention_forward.hpp"
#include "reference/attention_jvp.hpp"
#include "reference/plain_formula.hpp"

namespace fovea::reference {

/// Of one output. An element may err by `absolute` plus one rounding to `dtype`; all of them
/// together, as the Euclidean norm, by `norm`, roundings included.
struct Tolerance {
  Dtype dtype = Dtype::f32;
  double absolute = 0;
  double norm = 0;
  double plain_absolute = 0,
         plain_norm = 0;  // errors of the plain formula, for tests that print or compare them

  /// Elements that are finite for the oracle and not for the plain formula: scores or sums left the range of f32. They
  /// are compared all the same, with what the others allow.
  std::int64_t num_beyond_f32 = 0;

  /// Of recipes: where a rounding decides a code, up to `num_lumps` elements may err by `lump` more. They do not count
  /// in the norm.
  double lump = 0;
  std::int64_t num_lumps = 0;

  double allowed(double expected) const;
  /// What is not finite must be equal, NaN with NaN; but a number beyond the range of `dtype` may be infinite of its
  /// sign.
  bool allows(double got, double expected) const;
};

/// Half a unit in the last place of `value` in this dtype: what one rounding may cost.
double rounding(Dtype dtype, double value);

/// What a result may err by even where the plain formula is right by luck.
struct Floor {
  double absolute = 0;
  double norm = 0;
  /// Nor by more than this, whatever is lost: oracle and result both lie in one range.
  double most = std::numeric_limits<double>::infinity();
};

/// Twice the error of `plain` where it is finite, plus the floor, at most its `most`; plus one rounding to `dtype`.
/// Both row-major.
Tolerance tolerance(const std::vector<double>& plain, const std::vector<double>& expected,
                    Dtype dtype, const Floor& floor);

struct Tolerances {
  Tolerance out, lse, row_max;
};

/// Twice the error of the plain formula in these products, plus one rounding of the output, plus a
/// floor (see .cpp).
Tolerances tolerances(const AttentionForward& args, const ForwardResult& expected,
                      const Products& products);

/// The same of gradients: names of dcaptured are those of the slots.
struct GradientTolerances {
  Tolerance dq, dk, dv, dsinks;
  std::map<std::string, Tolerance> dcaptured;
};
GradientTolerances tolerances(const AttentionBackward& args, const BackwardResult& expected,
                              const Products& products);

/// The same of forward mode.
struct JvpTolerances {
  Tolerances forward;
  Tolerance out_tangent, lse_tangent;
};
JvpTolerances tolerances(const AttentionJvp& args, const JvpResult& expected,
                         const Products& products);

/// A result beside the oracle's, over all elements.
struct Comparison {
  std::size_t worst = 0;       // the element furthest beyond what it may err by, or nearest to it
  std::size_t largest = 0;     // that of the largest error
  double largest_error = 0;    // of finite elements
  std::int64_t num_wrong = 0;  // elements beyond what they may err by
  std::int64_t num_lumps = 0;  // elements that err by a lump; more than there may be are wrong
  double norm = 0;             // of the errors of all other finite elements
  double expected_norm = 0;

  bool passes(const Tolerance& tolerance) const { return num_wrong == 0 && norm <= tolerance.norm; }
};

/// Both row-major.
Comparison compare(const std::vector<double>& got, const std::vector<double>& expected,
                   const Tolerance& tolerance);

}  // namespace fovea::reference
