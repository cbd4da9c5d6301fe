#include "expr/interval.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "expr/parse.hpp"
#include "expr/passes.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

using expr::Box;
using expr::Interval;
using expr::Variable;

expr::NodePtr parsed(const std::string& text) {
  return expr::parse(text, testing::some_captures(), "formula");
}

// A tile of queries 64 to 127 and keys 0 to 31, one batch entry and head, 128 of each.
Box tile() {
  Box box;
  const auto set = [&](Variable v, double lo, double hi) {
    box.variables[static_cast<std::size_t>(v)] = {lo, hi, false};
  };
  set(Variable::score, -10, 10);
  set(Variable::batch, 0, 0);
  set(Variable::q_head, 0, 3);
  set(Variable::kv_head, 0, 0);
  set(Variable::q_idx, 64, 127);
  set(Variable::kv_idx, 0, 31);
  set(Variable::seqlen_q, 128, 128);
  set(Variable::seqlen_kv, 128, 128);
  return box;
}

Interval range(const std::string& text) {
  return expr::IntervalProgram(parsed(text)).evaluate(tile());
}

void expect_range(const std::string& text, double lo, double hi) {
  const Interval got = range(text);
  EXPECT_EQ(got.lo, lo) << text;
  EXPECT_EQ(got.hi, hi) << text;
}

TEST(Interval, AffineFormulasLoseNothing) {
  expect_range("q_idx - kv_idx", 33, 127);
  expect_range("q_idx + (seqlen_kv - seqlen_q) - kv_idx", 33, 127);
  expect_range("2 * q_idx - 3 * kv_idx + 1", 36, 255);
  expect_range("(q_idx - kv_idx) + kv_idx", 64, 127);
  expect_range("q_idx - (q_idx - 5)", 5, 5);
  expect_range("3 * (q_idx - kv_idx) - 2 * q_idx", -29, 127);
  EXPECT_TRUE(range("q_idx + 3 > q_idx").always_true());
  EXPECT_TRUE(range("q_idx - kv_idx == q_idx - kv_idx + 1").always_false());
}

TEST(Interval, MasksOfPositionsAreProven) {
  EXPECT_TRUE(range("kv_idx <= q_idx").always_true());
  EXPECT_TRUE(range("kv_idx > q_idx").always_false());
  EXPECT_TRUE(range("q_idx // 64 == kv_idx // 64").always_false());
  EXPECT_TRUE(range("q_idx // 64 == 1").always_true());
  EXPECT_TRUE(range("kv_idx >= q_idx - 32 || kv_idx < 32").always_true());
  expect_range("kv_idx <= q_idx - 64", 0, 1);
}

TEST(Interval, DivisionRoundsDownAndZeroGivesZero) {
  expect_range("(kv_idx - 16) // 5", -4, 3);
  expect_range("kv_idx % 32", 0, 31);
  expect_range("(kv_idx + 32) % 64", 32, 63);
  expect_range("(kv_idx - 40) % -64", -40, -9);
  expect_range("q_idx // (kv_idx - 1)", -127, 127);
  expect_range("q_idx % kv_idx", 0, 30);
}

TEST(Interval, OverflowIsAllOf32Bits) {
  expect_range("q_idx + 2147483647", -2147483648.0, 2147483647.0);
  expect_range("q_idx * 100000000", -2147483648.0, 2147483647.0);
  EXPECT_FALSE(range("q_idx + 2147483647 > q_idx").always_true());
}

TEST(Interval, BitsAndShifts) {
  expect_range("q_idx & 63", 0, 63);
  expect_range("kv_idx & 7", 0, 7);
  expect_range("(kv_idx - 8) & -1", -8, 23);
  expect_range("q_idx >> 6", 1, 1);
  expect_range("kv_idx << 2", 0, 124);
  expect_range("~kv_idx", -32, -1);
  expect_range("q_idx >> 38", 1, 1);
}

/// A fused multiply-add rounds once: up, where the product alone lies between two floats and rounds down.
TEST(Interval, SumsOfUnroundedProductsAreInside) {
  Box box = tile();
  box.variables[static_cast<std::size_t>(Variable::score)] = Interval::point(0x1.c363ccp+127);
  box.variables[static_cast<std::size_t>(Variable::kv_idx)] = Interval::point(2147483647);
  const Interval got = expr::IntervalProgram(parsed("score * 0.75 + kv_idx")).evaluate(box);
  const float product = 0x1.c363ccp+127F * 0.75F;
  EXPECT_TRUE(got.contains(product));
  EXPECT_TRUE(got.contains(std::fma(0x1.c363ccp+127F, 0.75F, 2147483647.0F)));
}

TEST(Interval, FloatsKnowWhetherTheyMayBeNaN) {
  EXPECT_FALSE(range("score * 2.0 + 1.0").may_be_nan);
  EXPECT_TRUE(range("log(score)").may_be_nan);
  EXPECT_TRUE(range("1.0 / score").may_be_nan);
  EXPECT_FALSE(range("score == score").always_false());
  EXPECT_TRUE(range("score == score").always_true());
  EXPECT_FALSE(range("log(score) == log(score)").always_true());
  EXPECT_TRUE(range("q_idx / 2 >= 32.0").always_true());
}

TEST(Interval, KnownConditionsSelectOneSide) {
  expect_range("q_idx > 10 ? 1 : 100", 1, 1);
  expect_range("q_idx > 100 ? 1 : 100", 1, 100);
}

TEST(Interval, LoadsAskWithClampedIndices) {
  Box box = tile();
  Interval seen;
  box.load_bounds = [&](const expr::Node& load, const Interval* indices) {
    EXPECT_EQ(load.name, "doc");
    seen = indices[1];
    return Interval{3, 4, false};
  };
  const expr::IntervalProgram program(parsed("doc[batch, q_idx - 70] == 5"));
  EXPECT_TRUE(program.evaluate(box).always_false());
  EXPECT_EQ(seen, (Interval{0, 57, false}));
  box.load_bounds = nullptr;
  EXPECT_FALSE(program.evaluate(box).always_false());
}

TEST(Interval, ScalarsThatAreNotKnownMayBeAnything) {
  Box box = tile();
  box.are_scalars_known = false;
  const auto range_of = [&](const char* text) {
    return expr::IntervalProgram(parsed(text)).evaluate(box);
  };
  EXPECT_FALSE(range_of("n == 2000000000").always_false());
  EXPECT_FALSE(range_of("t == t").always_true());  // NaN
  EXPECT_TRUE(range_of("n * 0 == 0").always_true());
  EXPECT_TRUE(range_of("abs(n % 7) < 7").always_true());
}

TEST(Interval, LongFormulasNeedNoStack) {
  std::string text = "q_idx";
  for (int i = 0; i < 300; ++i)
    text += " + " + std::to_string(i) + " * kv_idx";  // beyond the nodes kept on the stack
  EXPECT_EQ(range(text).lo, 64);
}

TEST(LoadRange, RefusesOnlyWhatIsNeverInside) {
  const auto refusal = [](const std::string& text) {
    return testing::refusal_of(
        [&] { expr::refuse_out_of_range_loads(parsed(text), tile(), "score_mod"); });
  };
  EXPECT_EQ(refusal("doc[batch, kv_idx]"), "");
  EXPECT_EQ(refusal("doc[batch, q_idx - 127]"), "");  // only query 127 is inside
  EXPECT_EQ(refusal("doc[batch, q_idx]"),
            "score_mod: index 1 of 'doc', q_idx, is in [64, 127]; expected 0 <= index < 64, the "
            "extent of that "
            "dimension");
  EXPECT_NE(refusal("slopes[-1 - q_head]"), "");
}

}  // namespace
}  // namespace fovea
