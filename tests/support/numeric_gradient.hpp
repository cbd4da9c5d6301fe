// Finite differences of fp64 functions of fp32 tensors: how gradients of the oracle are tested.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "support/guarded_tensor.hpp"

namespace fovea::testing {

/// Moves every finite element of an f32 tensor to a multiple of 2^-10, so that the steps below are
/// exact.
void round_to_grid(GuardedTensor& tensor);

/// EXPECTs that `gradient`, row-major, is that of f by the tensor's elements. Elements of stride 0
/// share memory, so their gradients are summed. NaN and Inf are left alone: nothing may see them, and
/// their gradient must be 0.
void expect_is_gradient(const std::vector<double>& gradient, GuardedTensor& tensor,
                        const std::function<double()>& f, std::string_view name);

}  // namespace fovea::testing
