// What a forward-mode kernel takes at the launch: the call, and its tangents in the same places. Strides are in
// elements.
#pragma once

#include "shared/forward_params.h"

namespace fovea::cuda {

struct JvpParams {
  /// The call. What splits keys or finds them in a cache is not set; row_max is null.
  ForwardParams forward;
  /// The same call with tangents in the places of tensors: q, k, v and sinks (null: 0) are read, out and lse written.
  /// Captures are those of `forward`, where programs read tangents beside captured data.
  ForwardParams tangent;
};

}  // namespace fovea::cuda
