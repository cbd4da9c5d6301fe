// Scores that a program caps and does nothing else to. A kernel then has a cap instead of a formula.
#pragma once

#include "expr/node.hpp"

namespace fovea::expr {

/// The cap c where the formula is c * tanh(score / c), made of scalars, captured tensors of rank 0 and constants. Null
/// where it has another form.
NodePtr cap_of(const NodePtr& score);

}  // namespace fovea::expr
