// --check: a result against the fp64 oracle, and how far it may be from it.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention.hpp"
#include "fovea/backward.hpp"

#include "difference.hpp"

namespace fovea::tools {

struct CheckResult {
  Difference out, lse;
  std::vector<std::pair<std::string, Difference>> gradients{};  // "dq", "dk", ..., captured slots

  bool passes() const {
    return out.passes() && lse.passes() &&
           std::ranges::all_of(gradients, [](const auto& each) { return each.second.passes(); });
  }
};

/// Compares args.out and args.lse (both written by a run that multiplied in compute_dtype) with the oracle. Allowed is
/// computed from the same problem: twice the error that the plain formula makes in fp32 (or with bf16 products), plus one
/// rounding of the output, plus a few roundings of the largest score.
CheckResult check_forward(const AttentionForward& args, ComputeDtype compute_dtype);

/// The same for the gradients that are wanted of args. The oracle computes out and lse anew; the plain formula has them from
/// args.forward, as a kernel does.
std::vector<std::pair<std::string, Difference>> check_backward(const AttentionBackward& args,
                                                               ComputeDtype compute_dtype);

}  // namespace fovea::tools
