// q, k and v of a forward call as codes of e4m3, by scales that the call gives: what this decides elsewhere.
#pragma once

#include "fovea/dtype.hpp"

namespace fovea {

/// q, k and v alike.
constexpr bool are_codes(Dtype inputs) { return inputs == Dtype::e4m3; }

/// Of out, where nobody says otherwise: codes have no room for it.
constexpr Dtype default_out_dtype(Dtype inputs) { return are_codes(inputs) ? Dtype::bf16 : inputs; }

}  // namespace fovea
