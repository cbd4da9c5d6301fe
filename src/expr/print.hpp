// The text form of a formula, with as few parentheses and conversions as parse needs to give the
// same node back.
#pragma once

#include <string>

#include "expr/node.hpp"

namespace fovea::expr {

std::string print(const Node& root);

}  // namespace fovea::expr
