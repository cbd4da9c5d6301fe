// What a score program may be read as where its mask shows a key: distances of keys that only lie on one side of a row
// have a sign, and need no abs. ALiBi beside a causal mask is then a line along the keys (kv_affine.hpp).
#pragma once

#include "expr/node.hpp"

namespace fovea::expr {

/// The same value at every key that the mask shows, whatever at others. Exact: what is compared are ints.
NodePtr score_where_visible(const NodePtr& score, const NodePtr& mask);

}  // namespace fovea::expr
