#include "reference/evaluate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "fovea/expr.hpp"
#include "fovea/mask.hpp"

namespace fovea::reference {
namespace {

constexpr std::int64_t kIntMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kIntMax = std::numeric_limits<std::int32_t>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Positions serve as variables of any value: `a` and `b` are ints, `score` is a float.
const Expr kA = arguments().q_idx;
const Expr kB = arguments().kv_idx;
const Expr kScore = arguments().score;

double value(const Expr& formula, const Position& at) {
  if (formula.type() == ExprType::boolean) return Evaluator(MaskMod(formula))(at);
  return Evaluator(ScoreMod(formula))(at);
}
double of_ints(const Expr& formula, std::int64_t a, std::int64_t b = 0) {
  return value(formula, {.q_idx = a, .kv_idx = b});
}
double of_score(const Expr& formula, double score) { return value(formula, {.score = score}); }
double of_score_is_true(const Expr& condition, double score) {
  return of_score(select(condition, 1.0, 0.0), score);
}

TEST(Evaluate, EveryVariableReadsItsOwnField) {
  const Arguments x = arguments();
  const Position at{.score = 0.5,
                    .batch = 1,
                    .q_head = 2,
                    .kv_head = 3,
                    .q_idx = 4,
                    .kv_idx = 5,
                    .seqlen_q = 6,
                    .seqlen_kv = 7};
  EXPECT_EQ(value(x.score, at), 0.5);
  EXPECT_EQ(value(x.batch, at), 1);
  EXPECT_EQ(value(x.q_head, at), 2);
  EXPECT_EQ(value(x.kv_head, at), 3);
  EXPECT_EQ(value(x.q_idx, at), 4);
  EXPECT_EQ(value(x.kv_idx, at), 5);
  EXPECT_EQ(value(x.seqlen_q, at), 6);
  EXPECT_EQ(value(x.seqlen_kv, at), 7);
}

TEST(Evaluate, IntegersWrapAt32Bits) {
  EXPECT_EQ(of_ints(kA + kB, kIntMax, 1), static_cast<double>(kIntMin));
  EXPECT_EQ(of_ints(kA - kB, kIntMin, 1), static_cast<double>(kIntMax));
  EXPECT_EQ(of_ints(kA * kB, 65536, 65536), 0);
  EXPECT_EQ(of_ints(kA * kB, kIntMax, kIntMax), 1);
  EXPECT_EQ(of_ints(-kA, kIntMin), static_cast<double>(kIntMin));
  EXPECT_EQ(of_ints(abs(kA), kIntMin), static_cast<double>(kIntMin));
  EXPECT_EQ(of_ints(abs(kA), -7), 7);
}

TEST(Evaluate, DivisionAndRemainderRoundToMinusInfinity) {
  EXPECT_EQ(of_ints(floor_div(kA, kB), 7, 2), 3);
  EXPECT_EQ(of_ints(floor_div(kA, kB), -7, 2), -4);
  EXPECT_EQ(of_ints(floor_div(kA, kB), 7, -2), -4);
  EXPECT_EQ(of_ints(floor_div(kA, kB), -7, -2), 3);
  EXPECT_EQ(of_ints(floor_div(kA, kB), -8, 2), -4);
  EXPECT_EQ(of_ints(kA % kB, 7, 2), 1);
  EXPECT_EQ(of_ints(kA % kB, -7, 2), 1);
  EXPECT_EQ(of_ints(kA % kB, 7, -2), -1);
  EXPECT_EQ(of_ints(kA % kB, -7, -2), -1);
  EXPECT_EQ(of_ints(kA % kB, -8, 2), 0);
  EXPECT_EQ(of_score(floor_div(kScore, 2.0), -7), -4);
  EXPECT_EQ(of_score(kScore % 2.0, -7), 1);
  EXPECT_EQ(of_score(kScore % -2.0, 7), -1);
}

TEST(Evaluate, IntegerDivisionByZeroGivesZero) {
  EXPECT_EQ(of_ints(floor_div(kA, kB), 5, 0), 0);
  EXPECT_EQ(of_ints(kA % kB, 5, 0), 0);
  EXPECT_EQ(of_ints(floor_div(kA, kB), kIntMin, -1), static_cast<double>(kIntMin));
  EXPECT_EQ(of_ints(kA % kB, kIntMin, -1), 0);
}

TEST(Evaluate, SlashIsFloatDivision) {
  EXPECT_EQ(of_ints(kA / kB, 7, 2), 3.5);
  EXPECT_EQ(of_ints(kA / kB, 7, 0), kInfinity);
}

TEST(Evaluate, ShiftsAreModulo32AndKeepTheSign) {
  EXPECT_EQ(of_ints(kA << kB, 1, 33), 2);
  EXPECT_EQ(of_ints(kA << kB, 1, 31), static_cast<double>(kIntMin));
  EXPECT_EQ(of_ints(kA << kB, 3, -31), 6);
  EXPECT_EQ(of_ints(kA >> kB, -8, 1), -4);
  EXPECT_EQ(of_ints(kA >> kB, -1, 31), -1);
  EXPECT_EQ(of_ints(kA >> kB, 8, 35), 1);
}

TEST(Evaluate, BitsOfIntsAreTwosComplement) {
  EXPECT_EQ(of_ints(kA & kB, -1, 12), 12);
  EXPECT_EQ(of_ints(kA | kB, 12, 3), 15);
  EXPECT_EQ(of_ints(kA ^ kB, -1, 12), -13);
  EXPECT_EQ(of_ints(~kA, 0), -1);
}

TEST(Evaluate, MinAndMaxKeepNaN) {
  EXPECT_EQ(of_ints(min(kA, kB), -3, 2), -3);
  EXPECT_EQ(of_ints(max(kA, kB), -3, 2), 2);
  EXPECT_EQ(of_score(min(kScore, 1.0), 3), 1);
  EXPECT_TRUE(std::isnan(of_score(min(kScore, 1.0), kNaN)));
  EXPECT_TRUE(std::isnan(of_score(max(1.0, kScore), kNaN)));
}

TEST(Evaluate, ConversionToIntTruncatesAndSaturates) {
  EXPECT_EQ(of_score(to_int(kScore), 2.9), 2);
  EXPECT_EQ(of_score(to_int(kScore), -2.9), -2);
  EXPECT_EQ(of_score(to_int(kScore), 1e20), static_cast<double>(kIntMax));
  EXPECT_EQ(of_score(to_int(kScore), -kInfinity), static_cast<double>(kIntMin));
  EXPECT_EQ(of_score(to_int(kScore), kNaN), 0);
}

TEST(Evaluate, ComparisonsWithNaNAreFalseButNotEqual) {
  EXPECT_EQ(of_score_is_true(kScore < 1.0, kNaN), 0);
  EXPECT_EQ(of_score_is_true(kScore <= 1.0, kNaN), 0);
  EXPECT_EQ(of_score_is_true(kScore > 1.0, kNaN), 0);
  EXPECT_EQ(of_score_is_true(kScore >= 1.0, kNaN), 0);
  EXPECT_EQ(of_score_is_true(kScore == kScore, kNaN), 0);
  EXPECT_EQ(of_score_is_true(kScore != kScore, kNaN), 1);
}

TEST(Evaluate, ComparisonsOfNumbers) {
  EXPECT_EQ(of_ints(kA < kB, 1, 1), 0);
  EXPECT_EQ(of_ints(kA <= kB, 1, 1), 1);
  EXPECT_EQ(of_ints(kA > kB, 2, 1), 1);
  EXPECT_EQ(of_ints(kA >= kB, 0, 1), 0);
  EXPECT_EQ(of_ints(kA == kB, 1, 1), 1);
  EXPECT_EQ(of_ints(kA != kB, 1, 1), 0);
}

TEST(Evaluate, LogicOfBools) {
  const Expr yes = kA == kA;
  const Expr no = kA != kA;
  EXPECT_EQ(of_ints(yes && no, 0), 0);
  EXPECT_EQ(of_ints(yes || no, 0), 1);
  EXPECT_EQ(of_ints(!no, 0), 1);
  EXPECT_EQ(of_ints(yes & yes, 0), 1);
  EXPECT_EQ(of_ints(yes ^ yes, 0), 0);
  EXPECT_EQ(of_ints(no | no, 0), 0);
  EXPECT_EQ(of_ints(~yes, 0), 0);
}

TEST(Evaluate, FunctionsOfFloats) {
  EXPECT_DOUBLE_EQ(of_score(exp(kScore), 1.5), std::exp(1.5));
  EXPECT_DOUBLE_EQ(of_score(exp2(kScore), 1.5), std::exp2(1.5));
  EXPECT_DOUBLE_EQ(of_score(log(kScore), 1.5), std::log(1.5));
  EXPECT_DOUBLE_EQ(of_score(log2(kScore), 8), 3);
  EXPECT_DOUBLE_EQ(of_score(tanh(kScore), 0.5), std::tanh(0.5));
  EXPECT_DOUBLE_EQ(of_score(sqrt(kScore), 2), std::sqrt(2));
  EXPECT_DOUBLE_EQ(of_score(rsqrt(kScore), 4), 0.5);
  EXPECT_DOUBLE_EQ(of_score(sigmoid(kScore), 0), 0.5);
  EXPECT_DOUBLE_EQ(of_score(sigmoid(kScore), -1000), 0);
  EXPECT_DOUBLE_EQ(of_score(pow(kScore, 3.0), 2), 8);
  EXPECT_EQ(of_score(floor(kScore), -0.5), -1);
  EXPECT_EQ(of_score(abs(kScore), -0.5), 0.5);
  EXPECT_EQ(of_score(-kScore, 0.5), -0.5);
}

TEST(Evaluate, SingleAndDoublePrecisionDifferAfterEveryOperation) {
  const ScoreMod third(kScore / 3.0);
  EXPECT_EQ(Evaluator(third)({.score = 1}), 1.0 / 3);
  EXPECT_EQ(Evaluator(third, Precision::f32)({.score = 1}), static_cast<double>(1.F / 3.F));
}

TEST(Evaluate, LoadsReadAnyStridesAndClamp) {
  // A 2 x 3 matrix stored column by column: element (i, j) is 10 i + j.
  const float columns[] = {0, 10, 1, 11, 2, 12};
  const Captured table = capture("table", view(columns, {2, 3}, {1, 2}));
  const Expr load = table(kA, kB);
  EXPECT_EQ(of_ints(load, 1, 2), 12);
  EXPECT_EQ(of_ints(load, 0, 1), 1);
  EXPECT_EQ(of_ints(load, -5, 1), 1);
  EXPECT_EQ(of_ints(load, 99, 99), 12);
  EXPECT_EQ(of_ints(load, kIntMin, kIntMax), 2);
}

TEST(Evaluate, LoadsOfEveryDtype) {
  const float f32[] = {1.5F};
  const float16 f16[] = {float16(1.5F)};
  const bfloat16 bf16[] = {bfloat16(1.5F)};
  const std::uint8_t u8[] = {200};
  const std::int8_t i8[] = {-100};
  const std::int32_t i32[] = {-70000};
  const std::int64_t i64[] = {std::int64_t{1} << 40};
  const bool yes[] = {true};
  EXPECT_EQ(of_ints(capture("t", view(f32, {1}))[kA], 0), 1.5);
  EXPECT_EQ(of_ints(capture("t", view(f16, {1}))[kA], 0), 1.5);
  EXPECT_EQ(of_ints(capture("t", view(bf16, {1}))[kA], 0), 1.5);
  EXPECT_EQ(of_ints(capture("t", view(u8, {1}))[kA], 0), 200);
  EXPECT_EQ(of_ints(capture("t", view(i8, {1}))[kA], 0), -100);
  EXPECT_EQ(of_ints(capture("t", view(i32, {1}))[kA], 0), -70000);
  EXPECT_EQ(of_ints(capture("t", view(i64, {1}))[kA], 0), static_cast<double>(kIntMax));
  EXPECT_EQ(of_ints(capture("t", view(yes, {1}))[kA], 0), 1);
}

TEST(Evaluate, ScalarsAndSelect) {
  const Expr threshold = scalar(CapturedScalar::of("threshold", 3));
  const Expr slope = scalar(CapturedScalar::of("slope", 0.25));
  const Expr formula = select(kA > threshold, slope * kA, -1.0);
  EXPECT_EQ(of_ints(formula, 4), 1);
  EXPECT_EQ(of_ints(formula, 3), -1);
}

TEST(Evaluate, SharedSubformulasAreOneValue) {
  // 2^40 paths through 40 nodes: ends only if each node is visited once.
  Expr sum = kScore;
  for (int i = 0; i < 40; ++i) sum = sum + sum;
  EXPECT_EQ(of_score(sum, 1), 0x1p40);
}

/// 70 draft tokens behind 5 context keys, in three words a row: each sees every third one, and itself.
TEST(Evaluate, TreesOfMoreDraftsThanAWordHasBitsShowWhatTheirBitsSay) {
  constexpr std::int64_t kDrafts = 70, kWords = 3, kContext = 5;
  const auto is_seen = [](std::int64_t row, std::int64_t draft) {
    return row == draft || (row + draft) % 3 == 0;
  };
  std::vector<std::int32_t> bits(kDrafts * kWords, 0);
  for (std::int64_t row = 0; row < kDrafts; ++row) {
    for (std::int64_t draft = 0; draft < kDrafts; ++draft) {
      auto& word = bits[static_cast<std::size_t>(row * kWords + draft / 32)];
      if (is_seen(row, draft))
        word = static_cast<std::int32_t>(static_cast<std::uint32_t>(word) | 1U << (draft % 32));
    }
  }
  Evaluator mask(tree(view(bits.data(), {kDrafts, kWords})));
  Position at{.seqlen_q = kDrafts, .seqlen_kv = kContext + kDrafts};
  for (at.q_idx = 0; at.q_idx < at.seqlen_q; ++at.q_idx) {
    for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
      const bool expected = at.kv_idx < kContext || is_seen(at.q_idx, at.kv_idx - kContext);
      ASSERT_EQ(mask(at) != 0, expected) << at.q_idx << " " << at.kv_idx;
    }
  }
}

}  // namespace
}  // namespace fovea::reference
