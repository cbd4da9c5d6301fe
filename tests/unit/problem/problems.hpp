// Small problems and calls that the tests of this folder bend out of shape.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fovea/attention.hpp"

#include "problem/forward.hpp"

namespace fovea::testing {

inline TensorSpec spec_of(Dtype dtype, const std::vector<std::int64_t>& shape,
                          const std::vector<std::int64_t>& strides = {}) {
  return make_spec(dtype, shape, strides);
}

/// No two extents are equal, so that a mix-up shows: batch 2, seqlen 3/5, heads 4/2, head_dim 8/6.
inline Problem dense_problem() {
  return {.q = spec_of(Dtype::f32, {2, 3, 4, 8}),
          .k = spec_of(Dtype::f32, {2, 5, 2, 8}),
          .v = spec_of(Dtype::f32, {2, 5, 2, 6})};
}

/// Three sequences in 7 and 9 packed rows.
inline Problem packed_problem() {
  return {.q = spec_of(Dtype::f32, {7, 4, 8}),
          .k = spec_of(Dtype::f32, {9, 2, 8}),
          .v = spec_of(Dtype::f32, {9, 2, 6}),
          .num_sequences = 3};
}

/// The message of the InvalidArgument that `call` throws.
template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(not refused)";
}

}  // namespace fovea::testing
