// How coarse the tables are that a mask reads by query and key: selections of pieces of the score matrix, such as
// t[q_head, q_idx // 64, kv_idx // 64]. Where tiles are such pieces, or parts of them, an element decides a whole tile.
#pragma once

#include <cstdint>

#include "expr/node.hpp"

namespace fovea::expr {

/// Positions from one multiple of a step up to the next read the same elements.
struct PositionSteps {
  std::int64_t q = 1, kv = 1;
  bool operator==(const PositionSteps&) const = default;
};

/// The largest steps for all loads by both q_idx and kv_idx; what else the mask does with positions counts for nothing,
/// since intervals prove tiles of comparisons empty or full whatever their size. {1, 1} where there is no such load.
/// A step is known from `q_idx // n` and `q_idx >> n` with constants alone.
PositionSteps position_steps(const Node& mask);

/// The same of all that the mask reads, comparisons too: it has one value from a multiple of a step up to the next. 0:
/// the mask does not read that position at all.
PositionSteps mask_steps(const Node& mask);

}  // namespace fovea::expr
