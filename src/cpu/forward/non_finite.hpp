// Values that are not finite. In keys that nobody sees they vanish in the mask; in values they would not (0 * NaN): a
// row whose result is not finite is computed again with such values taken out, and they are added only where they are
// seen. Read results.hpp next.
#pragma once

#include "cpu/forward/call.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/score_programs.hpp"

namespace fovea::cpu {

/// Rows whose sum of probabilities is not finite.
LaneSet non_finite_sums(const RowPanel& panel);

/// Rows alone, so that a row's bits do not depend on what its neighbours see.
LaneSet non_finite_rows(const RowPanel& panel, const ForwardCall& call);

/// Adds to scratch.extra what values of a tile that are not finite give to the rows that see them. The step's scores
/// are masked.
void collect_non_finite(const TileStep& step, const TileSource& values, const ForwardCall& call,
                        const ForwardScratch& scratch);

}  // namespace fovea::cpu
