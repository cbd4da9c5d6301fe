// Masks that show each row one range of keys, known from comparisons of kv_idx itself: causal, windows, their
// conjunctions. A kernel then finds two limits a row, and compares a key with them instead of evaluating the formula.
#pragma once

#include <optional>

#include "expr/node.hpp"

namespace fovea::expr {

/// Ints that do not read kv_idx; null: that side is open.
struct KvLimits {
  NodePtr first;  // kv_idx >= first
  NodePtr last;   // kv_idx <= last
};

/// Exactly the mask, for positions from 0 to 2^28; empty where the formula has another form.
std::optional<KvLimits> kv_limits(const NodePtr& mask);

}  // namespace fovea::expr
