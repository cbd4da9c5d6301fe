// Scores to which a program adds a line along the keys: ALiBi, sums and multiples of it, what depends on the row alone.
// A kernel then adds slope * (kv_idx - first) to the program's value at some first key, instead of evaluating the
// formula key by key. Where the formula is of a distance, the line may be bent at one key of each row.
#pragma once

#include <optional>

#include "expr/node.hpp"

namespace fovea::expr {

/// What the program adds to the score more at each key than at the key before: `slope` up to key `bend`, `slope_behind`
/// from there on. These read neither the score nor kv_idx; `bend` may, and is the same int at every key. Lines that are
/// straight have a slope alone.
struct ScoreLine {
  NodePtr slope;
  NodePtr bend = nullptr;
  NodePtr slope_behind = nullptr;
  bool is_bent() const { return bend != nullptr; }
};

/// None where the formula has another form, or adds a number that may be as large as the lowest float. As real numbers,
/// for positions from 0 to 2^28: an infinite slope has no line.
std::optional<ScoreLine> score_line(const NodePtr& score);

/// Of a straight line; null where there is none.
NodePtr score_slope(const NodePtr& score);

}  // namespace fovea::expr
