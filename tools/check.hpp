// --check: a result against the fp64 oracle, and how far it may be from it.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/attention.hpp"

#include "reference/attention_forward.hpp"

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

struct CheckResult {
  Difference out, lse;
  bool passes() const { return out.passes() && lse.passes(); }
};

/// Compares args.out and args.lse (both written by a run that multiplied in compute_dtype) with the oracle. Allowed is
/// computed from the same problem: twice the error that the plain formula makes in fp32 (or with bf16 products), plus one
/// rounding of the output, plus a few roundings of the largest score.
CheckResult check_forward(const AttentionForward& args, ComputeDtype compute_dtype);

}  // namespace fovea::tools
