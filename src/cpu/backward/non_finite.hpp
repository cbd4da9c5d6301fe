// NaN and infinity in dO. P and dS are set to 0 at hidden positions, not multiplied by 0, and rows of K, Q and dO enter
// the last three products with elements that are not finite taken out, because 0 · NaN is NaN. Rows that see one have a
// NaN in P or dS, which those products carry on; only dV would lose the elements of dO, so these are added apart.
#pragma once

#include "cpu/backward/tile_scores.hpp"

namespace fovea::cpu {

/// Elements of dO that are not finite, to the keys that their rows see (scratch.seen: masked scores). dv: of the first
/// key of the tile that the panel sees.
void add_non_finite(const GradientTile& tile, const BackwardCall& call,
                    const BackwardScratch& scratch, float* dv);

}  // namespace fovea::cpu
