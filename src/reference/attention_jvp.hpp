// The oracle of forward mode: tangents of out and lse in fp64. Read softmax.hpp first.
#pragma once

#include <vector>

#include "fovea/jvp.hpp"

#include "reference/attention_forward.hpp"

namespace fovea::reference {

/// Row-major fp64: out and lse, and their tangents in the same shapes.
struct JvpResult {
  ForwardResult forward;
  std::vector<double> out_tangent, lse_tangent;
};

/// Reads inputs and tangents, writes nothing. A row without visible keys has tangents of 0, but for
/// the lse of a row that has a sink: it is the sink.
JvpResult attention_jvp(const AttentionJvp& args);

}  // namespace fovea::reference
