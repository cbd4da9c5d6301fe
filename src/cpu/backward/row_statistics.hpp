// What the tiles must know of a row before they begin: lse, in parts where it is large, and delta. Read
// summed_delta.hpp next.
#pragma once

#include "cpu/backward/call.hpp"

namespace fovea::cpu {

/// Fills origin, log_sum and delta of BackwardMemory for these rows. Where the plan sums delta, dO · O is left out.
void compute_row_statistics(const RowRange& rows, const BackwardCall& call,
                            const BackwardScratch& scratch);

}  // namespace fovea::cpu
