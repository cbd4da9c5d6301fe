#include "expr/parse.hpp"

#include <gtest/gtest.h>

#include "expr/print.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

using testing::refusal_of;
using testing::some_captures;

expr::NodePtr parsed(const std::string& text) {
  return expr::parse(text, some_captures(), "score_mod");
}

std::string refusal(const std::string& text) {
  return refusal_of([&] { parsed(text); });
}

// How the text is grouped, shown by the printer's parentheses around an equal text with all of
// them.
void expect_same(const std::string& text, const std::string& grouped) {
  EXPECT_EQ(expr::print(*parsed(text)), expr::print(*parsed(grouped)));
  EXPECT_EQ(parsed(text)->digest, parsed(grouped)->digest) << text << " is not " << grouped;
}

TEST(Parse, PrecedenceIsThatOfTheGuide) {
  expect_same("true || false && true", "true || (false && true)");
  expect_same("!q_idx < 3 && true", "(!(q_idx < 3)) && true");
  expect_same("q_idx | 1 ^ 2 & 3 << 1 + n * 2", "q_idx | (1 ^ (2 & (3 << (1 + (n * 2)))))");
  expect_same("q_idx & 31 == 0", "(q_idx & 31) == 0");
  expect_same("-q_idx * ~n", "(-q_idx) * (~n)");
  expect_same("q_idx < 3 || kv_idx < 2 ? 1 : 2", "((q_idx < 3) || (kv_idx < 2)) ? 1 : 2");
  expect_same("q_idx < 3 ? 1 : q_idx < 4 ? 2 : 3", "q_idx < 3 ? 1 : (q_idx < 4 ? 2 : 3)");
}

TEST(Parse, OperatorsOfOneLevelGroupToTheLeft) {
  expect_same("1 - n - 3", "(1 - n) - 3");
  expect_same("q_idx // 2 % 3 * 4", "((q_idx // 2) % 3) * 4");
  expect_same("q_idx << 1 >> n", "(q_idx << 1) >> n");
}

TEST(Parse, WordsAreOperators) {
  expect_same("not q_idx < 3 and kv_idx < 2 or true", "!(q_idx < 3) && kv_idx < 2 || true");
}

TEST(Parse, FunctionsAndOperatorsMeanTheSame) {
  expect_same("select(q_idx < 3, score, -inf)", "q_idx < 3 ? score : -inf");
}

TEST(Parse, LiteralsHaveTypesOfTheirSpelling) {
  EXPECT_EQ(parsed("3")->type, ExprType::integer);
  EXPECT_EQ(parsed("3.0")->type, ExprType::floating);
  EXPECT_EQ(parsed("1e-3")->type, ExprType::floating);
  EXPECT_EQ(parsed("true")->type, ExprType::boolean);
  EXPECT_EQ(parsed("inf")->type, ExprType::floating);
  EXPECT_EQ(parsed("0x1F")->int_value, 31);
  EXPECT_EQ(parsed("0xffffffff")->int_value, -1);
  EXPECT_EQ(parsed("-2147483648")->int_value, INT32_MIN);
  EXPECT_EQ(parsed(".5")->float_value, 0.5);
  EXPECT_EQ(parsed("1e-60")->float_value, 0);
  EXPECT_EQ(parsed("0.1")->float_value, static_cast<double>(0.1F));
}

TEST(Parse, ErrorsPointAtTheOffendingToken) {
  const std::pair<const char*, const char*> kCases[] = {
      {"score + slpoes[q_head]", "score_mod: column 9: unknown name 'slpoes'; expected"},
      {"score + foo(q_head)", "score_mod: column 9: unknown function 'foo'; expected"},
      {"score + min(q_head)", "score_mod: column 9: 'min' got 1 argument; expected 2"},
      {"score + slopes", "score_mod: column 9: 'slopes' is a captured tensor"},
      {"score + slopes(1)", "score_mod: column 9: 'slopes' is a captured tensor"},
      {"score + n[1]", "score_mod: column 9: 'n' is a number"},
      {"score + doc[1]", "score_mod: column 9: 'doc' got 1 index; expected 2"},
      {"score + doc[1, score]", "score_mod: column 16: index 1 of 'doc' is float"},
      {"score + doc[2, 0]", "score_mod: column 13: index 0 of 'doc' is 2; expected 0 <= index < 2"},
      {"score + doc[0, 1 - 2]", "score_mod: column 16: index 1 of 'doc' is -1"},
      {"score && true", "score_mod: column 7: '&&' got float and bool; expected bool"},
      {"score << 1", "score_mod: column 7: '<<' got float and int; expected ints"},
      {"q_idx ? 1 : 2", "score_mod: column 1: the condition of select is int"},
      {"q_idx < kv_idx < 3", "score_mod: column 16: comparisons do not chain"},
      {"q_idx == kv_idx != true", "score_mod: column 17: comparisons do not chain"},
      {"q_idx // 0", "score_mod: column 10: '//' divides by the constant zero"},
      {"q_idx / (1 - 1)", "score_mod: column 9: '/' divides by the constant zero"},
      {"q_idx % -0.0", "score_mod: column 9: '%' divides by the constant zero"},
      {"true == !false", "score_mod: column 9: '!' binds looser"},
      {"score +", "score_mod: column 8: the formula ends here"},
      {"(score", "score_mod: column 7: the formula ends here; expected ')'"},
      {"score)", "score_mod: column 6: unexpected ')'"},
      {"  ", "score_mod: column 3: the formula is empty"},
      {"score = 3", "score_mod: column 7: unexpected '='; expected '==' to compare"},
      {"score $ 3", "score_mod: column 7: unexpected character '$'"},
      {"let = 3; score", "score_mod: column 5: unexpected '='; expected a name after 'let'"},
      {"let x 3; score", "score_mod: column 7: unexpected '3'; expected '='"},
      {"let x = 3 score", "score_mod: column 11: unexpected 'score'; expected ';'"},
      {"let x = 3;", "score_mod: column 11: the formula ends here"},
      {"let score = 3; score", "score_mod: column 5: 'score' is a word of the language"},
      {"let n = 3; score", "score_mod: column 5: 'n' is captured; expected another name"},
      {"let x = 3; let x = 4; x", "score_mod: column 16: 'x' has been defined"},
      {"let x = y; let y = 4; x", "score_mod: column 9: unknown name 'y'"},
      {"score + (let x = 3; x)", "score_mod: column 10: 'let' stands in a formula"},
      {"let x = 3; x[0]", "score_mod: column 12: 'x' is a number"},
      {"let x = 3; score / (x - 3)", "score_mod: column 20: '/' divides by the constant zero"},
      {"score + 3x", "score_mod: column 9: malformed number '3x'"},
      {"score + 2147483648", "score_mod: column 9: the number 2147483648 is beyond 32 bits"},
      {"score + 1e39", "score_mod: column 9: the number 1e39 is beyond fp32"},
      {"score + 99999999999999999999", "score_mod: column 9: the number"},
      {"score + one[0]", "score_mod: column 9: 'one' is a captured tensor of rank 0; expected one"},
      {"score + one[]", "score_mod: column 9: 'one' is a captured tensor of rank 0; expected one"},
  };
  for (const auto& [text, start] : kCases) {
    EXPECT_TRUE(refusal(text).starts_with(start)) << text << ": " << refusal(text);
  }
}

TEST(Parse, ErrorsKnowTheirColumn) {
  const auto column = [](const auto& parse) {
    try {
      parse();
    } catch (const ParseError& error) {
      EXPECT_NE(std::string(error.what()).find("column " + std::to_string(error.column()) + ":"),
                std::string::npos);
      return error.column();
    }
    return std::size_t{0};
  };
  EXPECT_EQ(column([] { parsed("score + slpoes[q_head]"); }), 9U);
  EXPECT_EQ(column([] { parsed("score +"); }), 8U);
  EXPECT_EQ(column([] { parsed("score + 1e39"); }), 9U);
  EXPECT_EQ(column([] { static_cast<void>(parse_mask_mod("  q_idx")); }), 3U);
  EXPECT_EQ(column([] { static_cast<void>(parse_mask_mod("q_idx < score")); }), 9U);
}

TEST(Parse, LetNamesAPart) {
  expect_same("let d = q_idx - kv_idx; d * d", "(q_idx - kv_idx) * (q_idx - kv_idx)");
  expect_same("let d = q_idx - kv_idx; let e = 2 * d; score + (e < 3 ? d : e)",
              "score + (2 * (q_idx - kv_idx) < 3 ? q_idx - kv_idx : 2 * (q_idx - kv_idx))");
  expect_same("let near = q_idx - kv_idx < n; near && !near ? 1 : 2",
              "q_idx - kv_idx < n && !(q_idx - kv_idx < n) ? 1 : 2");
  expect_same("let unread = slopes[q_head]; score", "score");
  // A name stands for its part, not for its text.
  expect_same("let s = 1 + 2; s * 3", "(1 + 2) * 3");
}

TEST(Parse, NamedPartsNestAsIfWrittenOut) {
  const auto nested = [](int count) {
    std::string text = "let p0 = score;";
    for (int i = 1; i <= count; ++i) {
      const std::string before = std::to_string(i - 1);
      text += " let p" + std::to_string(i) + " = abs(abs(p" + before + "));";
    }
    return refusal(text + " p" + std::to_string(count));
  };
  EXPECT_EQ(nested(20), "");
  EXPECT_NE(nested(100).find("nests more than 200 deep"), std::string::npos);
}

TEST(Parse, ATensorOfRankZeroIsAName) {
  const expr::NodePtr node = parsed("score * one + one");
  EXPECT_EQ(node->operands[1]->op, expr::Op::load);
  EXPECT_TRUE(node->operands[1]->operands.empty());
  EXPECT_EQ(expr::print(*node), "score * one + one");
}

TEST(Parse, UnknownNamesSuggestTheNearestOne) {
  EXPECT_TRUE(refusal("score + slpoes[q_head]").ends_with(", did you mean 'slopes'?"));
  EXPECT_TRUE(refusal("score + q_ixd").ends_with(", did you mean 'q_idx'?"));
  EXPECT_TRUE(refusal("tahn(score)").ends_with(", did you mean 'tanh'?"));
  EXPECT_FALSE(refusal("zebra + 1").ends_with("?"));
}

TEST(Parse, DeepFormulasAreRefusedNotOverflowed) {
  const auto repeated = [](const std::string& part, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += part;
    return text;
  };
  constexpr int kTooDeep = 100000;  // would take a recursive parser past any stack
  for (const char* part : {"(", "-", "~", "!", "abs(", "slopes[", "true ? 1 : ", "- ( "}) {
    EXPECT_NE(refusal(repeated(part, kTooDeep)).find("nests more than"), std::string::npos) << part;
  }
  EXPECT_NE(refusal("1" + repeated(" + 1", kTooDeep)).find("more than 10000 parts (names,"),
            std::string::npos);
}

TEST(Parse, LongFlatFormulasGoThroughEveryPass) {
  constexpr int kTerms =
      3000;  // deep to the left, far beyond what recursion over nodes would stand comfortably
  std::string text = "score";
  for (int i = 0; i < kTerms; ++i) text += " + slopes[q_head]";
  EXPECT_TRUE(parsed(expr::print(*parsed(text)))->digest == parsed(text)->digest);
}

TEST(Parse, ASumOfDistinctTermsIsPrintedAsItIs) {
  std::string text = "score";
  for (int i = 0; i < 256; ++i) text += " + slopes[q_head * " + std::to_string(i + 2) + "]";
  EXPECT_EQ(expr::print(*parsed(text)), text);
}

TEST(Parse, CapturedNamesMustBeUsableAndDistinct) {
  const auto with_name = [](const std::string& name) {
    Captures captures = some_captures();
    captures.scalars.push_back(CapturedScalar::of(name, 1));
    return refusal_of([&] { expr::parse("score", captures, "score_mod"); });
  };
  EXPECT_EQ(with_name("m"), "");
  for (const char* name : {"score", "min", "and", "inf", "select", "3x", "a-b", "", "slopes"}) {
    EXPECT_TRUE(with_name(name).starts_with("score_mod: captured name")) << with_name(name);
  }
}

TEST(Parse, ProgramsCheckTheTypeOfTheWhole) {
  EXPECT_EQ(parse_score_mod("q_idx").expr().type(), ExprType::floating);
  EXPECT_TRUE(refusal_of([] {
                static_cast<void>(parse_score_mod(" q_idx < 3"));
              }).starts_with("score_mod: column 2: the formula is bool"));
  EXPECT_TRUE(refusal_of([] {
                static_cast<void>(parse_mask_mod("q_idx"));
              }).starts_with("mask_mod: column 1: the formula is int"));
  EXPECT_TRUE(refusal_of([] {
                static_cast<void>(parse_mask_mod("q_idx < score"));
              }).starts_with("mask_mod: column 9: a mask cannot read 'score'"));
}

}  // namespace
}  // namespace fovea
