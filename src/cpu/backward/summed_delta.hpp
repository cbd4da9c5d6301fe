// delta of the very numbers that dS is made of, by one more walk over S and dP. dO · O has the rounding of out, which
// the factors of captured tensors would multiply. Read chunk_walk.hpp next.
#pragma once

#include "cpu/backward/call.hpp"

namespace fovea::cpu {

/// BackwardMemory::delta of these rows = Σ P dP / Σ P - dlse.
void sum_delta(const RowRange& rows, const BackwardCall& call, const BackwardScratch& scratch);

}  // namespace fovea::cpu
