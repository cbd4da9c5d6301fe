// The text form of a formula, with as few parentheses and conversions as parse needs to give the
// same node back. A part that stands several times and is worth a name gets one: let t0 = ...; t0 * t0.
#pragma once

#include <cstddef>
#include <string>

#include "expr/node.hpp"

namespace fovea::expr {

/// Throws InvalidArgument where it is longer than 1 MiB.
std::string print(const Node& root);

/// For people to read: a text of more than `most` bytes is cut there, and ends in " ...".
std::string print_up_to(const Node& root, std::size_t most);

}  // namespace fovea::expr
