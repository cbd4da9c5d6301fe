// Text to formula. The grammar stands in docs/guides/programs.md; errors carry the 1-based column.
#pragma once

#include <string_view>

#include "expr/node.hpp"

namespace fovea::expr {

/// Deep enough for any formula written by hand or printed, shallow enough for the stack of any thread.
inline constexpr int kMaxNesting = 200;
/// Names, numbers and operators: what other passes make of so many ends soon.
inline constexpr int kMaxParts = 10000;

struct ParseOptions {
  std::string_view argument = "formula";  // what errors name: score_mod, mask_mod
  bool may_read_score = true;
};

/// Throws InvalidArgument: "score_mod: column 9: unknown name 'slpoes'; expected a variable (...),
/// or a captured tensor ...". Formulas nest at most kMaxNesting deep and have at most kMaxParts parts.
NodePtr parse(std::string_view text, const Captures& captures, const ParseOptions& options);

inline NodePtr parse(std::string_view text, const Captures& captures, std::string_view argument) {
  return parse(text, captures, ParseOptions{.argument = argument});
}

}  // namespace fovea::expr
