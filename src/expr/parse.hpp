// Text to formula. The grammar stands in docs/guides/programs.md; errors carry the 1-based column.
#pragma once

#include <string_view>

#include "expr/node.hpp"

namespace fovea::expr {

/// Throws InvalidArgument: "score_mod: column 9: unknown name 'slpoes'; expected a variable (...), or a captured tensor ...".
NodePtr parse(std::string_view text, const Captures& captures, std::string_view argument);

}  // namespace fovea::expr
