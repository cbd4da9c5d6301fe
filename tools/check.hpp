// --check: a result against the fp64 oracle, and how far it may be from it (reference/tolerance.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"

#include "reference/plain_formula.hpp"

namespace fovea::tools {

/// Of one output, over all finite elements. Elements that are not finite must be equal (NaN with NaN), unless the dtype
/// cannot hold a number.
struct Difference {
  double max_error = 0;
  double allowed = 0;      // for the element of max_error
  double relative_l2 = 0;  // |got - expected| / |expected|
  double allowed_relative_l2 = 0;
  std::int64_t num_wrong = 0;  // elements beyond what is allowed
  // elements whose scores or sums leave the range of f32, and are finite in fp64
  std::int64_t num_beyond_f32 = 0;
  bool passes() const { return num_wrong == 0 && relative_l2 <= allowed_relative_l2; }
};

struct CheckResult {
  Difference out, lse;
  std::vector<std::pair<std::string, Difference>> gradients{};  // "dq", "dk", ..., captured slots

  std::int64_t num_beyond_f32() const;
  bool passes() const {
    return out.passes() && lse.passes() &&
           std::ranges::all_of(gradients, [](const auto& each) { return each.second.passes(); });
  }
};

/// Compares args.out and args.lse (both written by a run of such products) with the oracle.
CheckResult check_forward(const AttentionForward& args, const reference::Products& products);

/// The same for the gradients that are wanted of args.
std::vector<std::pair<std::string, Difference>> check_backward(const AttentionBackward& args,
                                                               const reference::Products& products);

}  // namespace fovea::tools
