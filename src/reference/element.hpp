// Elements of any dtype as fp64, for the oracle and its evaluator.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/tensor.hpp"

namespace fovea::reference {

/// The element `offset` elements away from the view's first. i64 is read saturated to 32 bits, as
/// programs see it.
double element(const TensorView& view, std::int64_t offset);

/// All of them, row-major whatever the strides.
std::vector<double> elements(const TensorView& view);

}  // namespace fovea::reference
