#include <gtest/gtest.h>

#include "expr/parse.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

std::string simplified(const std::string& text) {
  return expr::print(*expr::simplify(expr::parse(text, testing::some_captures(), "formula")));
}

TEST(Simplify, FoldsConstants) {
  EXPECT_EQ(simplified("1 + 2 * 3 - 7 // 2"), "4");
  EXPECT_EQ(simplified("-7 // 2 + -7 % 3 * 100"), "196");
  EXPECT_EQ(simplified("2147483647 + 1"), "-2147483648");
  EXPECT_EQ(simplified("0.5 + 0.25 < 1.0 ? score : 0.0"), "score");
  EXPECT_EQ(simplified("1 << 33"), "2");
}

TEST(Simplify, DropsWhatDoesNothing) {
  EXPECT_EQ(simplified("(q_idx + 0) * 1 - (kv_idx - kv_idx)"), "q_idx");
  EXPECT_EQ(simplified("score * 1.0 / 1 - 0.0"), "score");
  EXPECT_EQ(simplified("!!(q_idx < 3) && true || false"), "q_idx < 3");
  EXPECT_EQ(simplified("!(q_idx < 3)"), "q_idx >= 3");
  EXPECT_EQ(simplified("q_idx < 3 ? score : score"), "score");
  EXPECT_EQ(simplified("q_idx + 3 - 5 + 1"), "q_idx - 1");
  EXPECT_EQ(simplified("q_idx <= q_idx"), "true");
  EXPECT_EQ(simplified("flags[q_idx] == true"), "flags[q_idx]");
}

TEST(Simplify, KeepsWhatNaNAndSignedZerosCouldShow) {
  for (const char* text :
       {"score * 0.0", "score + 0.0", "score - score", "score == score", "score / score",
        "!score < 1.0", "0.0 - score", "min(0.0, -0.0)", "exp(0.0)"}) {
    EXPECT_EQ(simplified(text), text);
  }
}

TEST(Verify, NamesThePassAndTheNode) {
  expr::Node broken =
      *expr::make(expr::Op::add, {expr::make_constant(1.0), expr::make_constant(2.0)});
  broken.operands[1] = expr::make_constant(true);
  try {
    expr::verify(broken, "the test");
    FAIL() << "a float plus a bool was accepted";
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(),
                 "internal: after the test, node '+' is broken: an operand has another type");
  }
}

}  // namespace
}  // namespace fovea
