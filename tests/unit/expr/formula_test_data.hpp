// Captured tensors without data: formulas are built, printed and bounded from shapes alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/expr.hpp"

namespace fovea::testing {

inline TensorView shape_only(Dtype dtype, const std::vector<std::int64_t>& shape) {
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    spec.shape[dim] = shape[dim];
    spec.strides[dim] = stride;
    stride *= shape[dim];
  }
  return {static_cast<const void*>(nullptr), spec};
}

inline Captures some_captures() {
  return {.tensors = {{"slopes", shape_only(Dtype::f32, {8})},
                      {"doc", shape_only(Dtype::i32, {2, 64})},
                      {"flags", shape_only(Dtype::boolean, {64})},
                      {"one", shape_only(Dtype::f32, {})}},
          .scalars = {CapturedScalar::of("n", 3), CapturedScalar::of("t", 0.5)}};
}

/// The message of the InvalidArgument that `call` throws; empty when it throws none.
template <typename Call>
std::string refusal_of(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace fovea::testing
