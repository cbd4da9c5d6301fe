// A call's gradients: what bench and tune run where a case is of backward.
#pragma once

#include "fovea/backward.hpp"

#include "array.hpp"
#include "gpu.hpp"

namespace fovea::tools {

/// All gradients of a call with out and lse, which has run when these do; out stands in for its own gradient. They are
/// contiguous, in the dtypes of their inputs.
struct GradientCall {
  Array dq, dk, dv, dsinks;
  AttentionBackward args;

  /// `gpu`: where the call's tensors lie; null: on the host.
  GradientCall(const AttentionForward& forward, const Gpu* gpu);
  GradientCall(const GradientCall&) = delete;
  GradientCall& operator=(const GradientCall&) = delete;
};

}  // namespace fovea::tools
