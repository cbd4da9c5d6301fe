// Recipes in operations that have no quantised path: refused by name, never dropped.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "fovea/quant.hpp"

#include "problem/tensor_checks.hpp"

namespace fovea {

/// `what`: "gradients". The hint is the caller's way on: the same call without a recipe.
inline void refuse_quantization(const TensorChecks& checks, const Quantization& quant,
                                std::string_view what) {
  if (quant.is_none()) return;
  checks.refuse(fmt::format(
      "quant is {}; expected none: {} have no quantised path yet, call them without a recipe",
      print(quant), what));
}

}  // namespace fovea
