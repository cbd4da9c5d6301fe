// The text of a formula is the formula: parse(print(e)) is e, node for node.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "fovea/error.hpp"

#include "expr/parse.hpp"
#include "expr/print.hpp"
#include "property/expr_formulas.hpp"

namespace fovea {
namespace {

using testing::for_random_formulas;
using testing::FormulaData;
using testing::FormulaGenerator;

TEST(ExprText, PrintedFormulaParsesToTheSameNode) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 30);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto formula = generator.formula(num_steps);
      const std::string text = expr::print(*formula);
      RC_LOG() << text << '\n';
      const auto parsed = expr::parse(text, captures, "formula");
      RC_LOG() << expr::print(*parsed) << '\n';
      RC_ASSERT(parsed->digest == formula->digest);
      RC_ASSERT(expr::print(*parsed) == text);
    });
  });
  EXPECT_TRUE(holds);
}

TEST(ExprText, SimplifiedFormulaPrintsAndParsesToo) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 30);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto formula = expr::simplify(generator.formula(num_steps));
      const std::string text = expr::print(*formula);
      RC_LOG() << text << '\n';
      RC_ASSERT(expr::parse(text, captures, "formula")->digest == formula->digest);
    });
  });
  EXPECT_TRUE(holds);
}

TEST(ExprText, AnyBytesAreParsedOrRefusedWithAColumn) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    for_random_formulas(captures, seed, [&](FormulaGenerator& random) {
      // Words and symbols in any order reach deeper into the grammar than bytes do.
      static const std::vector<std::string> kWords = {
          "score", "q_idx", "slopes", "ids",    "n",   "t",     "3",   "0",    "2.5",  "-",
          "+",     "*",     "/",      "//",     "%",   "(",     ")",   "[",    "]",    ",",
          "?",     ":",     "<",      "==",     "&&",  "||",    "!",   "&",    "|",    "^",
          "~",     "<<",    "min",    "select", "int", "float", "not", "and",  "@",    "1e99",
          "0x",    "true",  "nan",    "let",    "x",   "=",     ";",   "gain", "round"};
      std::string text;
      for (int i = random.below(12); i >= 0; --i) {
        text +=
            kWords[static_cast<std::size_t>(random.below(static_cast<int>(kWords.size())))] + " ";
      }
      if (random.below(2) == 0) text = "let x = q_idx * 2; " + text;
      RC_LOG() << text << '\n';
      try {
        expr::parse(text, captures, "formula");
      } catch (const ParseError& error) {
        RC_ASSERT(std::string(error.what())
                      .starts_with("formula: column " + std::to_string(error.column()) + ": "));
        RC_ASSERT(error.column() <= text.size() + 1);
      }
    });
  });
  EXPECT_TRUE(holds);
}

}  // namespace
}  // namespace fovea
