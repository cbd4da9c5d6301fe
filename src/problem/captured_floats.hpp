// What a score program captures and derivatives flow through: float tensors and float scalars, by name.
#pragma once

#include <string_view>

#include "fovea/expr.hpp"

#include "problem/tensor_checks.hpp"

namespace fovea {

/// A gradient or tangent of something that a program captures.
struct CapturedFloat {
  std::string_view argument;  // of the call: "dcaptured"
  std::string_view name;      // of the capture
  const TensorSpec& spec;
};

/// Refuses a name that the program does not capture, what is no float, and a shape other than the captured tensor's
/// (scalars and tensors of rank 0: one element). Returns whether it is such a single number.
bool check_captured_float(const TensorChecks& checks, const Captures& captures,
                          const CapturedFloat& given);

}  // namespace fovea
