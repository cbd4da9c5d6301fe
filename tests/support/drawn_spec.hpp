// Layouts that tests draw for tensors beside q, k, v and out: sinks, statistics, indices, tables, captured tensors.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/tensor.hpp"

#include "support/random.hpp"

namespace fovea::testing {

/// What the strides of a tensor may be: of an output, positive; of an input, negative too; of an input any values of
/// which will do, 0 too (elements that share memory keep the last value).
enum class Strides : std::uint8_t { of_output, of_input, of_any_values };

/// Row-major in a third of the draws. Else dimensions lie in any order and apart, and a dimension of one element has a
/// stride that leads out of the memory.
TensorSpec drawn_spec(Dtype dtype, std::span<const std::int64_t> shape, const Random& random,
                      Strides strides);

}  // namespace fovea::testing
