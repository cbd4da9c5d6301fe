// The text form of a formula, with as few parentheses and conversions as parse needs to give the
// same node back.
#pragma once

#include <cstddef>
#include <string>

#include "expr/node.hpp"

namespace fovea::expr {

std::string print(const Node& root);

/// For people to read: a text of more than `most` bytes is cut there, and ends in " ...". It costs what is shown,
/// however large the formula: shared parts are written out each time, so the text of a small one can be exponential.
std::string print_up_to(const Node& root, std::size_t most);

}  // namespace fovea::expr
