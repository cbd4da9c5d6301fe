// CompileMode in operations whose kernels have no stand-in that compiles sooner: refused by name, never dropped.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "fovea/problem.hpp"

#include "problem/tensor_checks.hpp"

namespace fovea {

/// `what`: "gradients".
inline void refuse_stages(const TensorChecks& checks, const Problem& forward,
                          std::string_view what) {
  if (forward.compile_mode != CompileMode::staged) return;
  checks.refuse(
      fmt::format("compile_mode is staged; expected auto or complete: {} have no kernel that "
                  "compiles sooner than another",
                  what));
}

}  // namespace fovea
