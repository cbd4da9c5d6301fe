// Recipes and codes in operations that have no path for them: refused by name, never dropped.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "fovea/problem.hpp"

#include "problem/input_codes.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {

/// `what`: "gradients".
inline void refuse_codes(const TensorChecks& checks, const Problem& problem,
                         std::string_view what) {
  if (!are_codes(problem.q.dtype)) return;
  checks.refuse(fmt::format("q is {}; expected f32, f16 or bf16: codes have no {}",
                            name(problem.q.dtype), what));
}

/// The hint is the caller's way on: the same call without a recipe, which codes do not have.
inline void refuse_quantization(const TensorChecks& checks, const Problem& problem,
                                std::string_view what) {
  refuse_codes(checks, problem, what);
  if (problem.quant.is_none()) return;
  checks.refuse(fmt::format(
      "quant is {}; expected none: {} have no quantised path yet, call them without a recipe",
      print(problem.quant), what));
}

}  // namespace fovea
