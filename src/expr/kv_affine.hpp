// Scores to which a program adds a line along the keys: ALiBi, sums and multiples of it, what depends on the row alone.
// A kernel then adds slope * (kv_idx - first) to the program's value at some first key, instead of evaluating the
// formula key by key.
#pragma once

#include "expr/node.hpp"

namespace fovea::expr {

/// What the program adds to the score more at each key than at the key before; reads neither the score nor kv_idx. Null
/// where the formula has another form, or adds a number that may be as large as the lowest float. As real numbers, for
/// positions from 0 to 2^28: an infinite slope has no line.
NodePtr score_slope(const NodePtr& score);

}  // namespace fovea::expr
