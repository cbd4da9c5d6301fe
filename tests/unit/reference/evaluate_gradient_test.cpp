// Derivatives of the oracle's evaluator: the kinks by hand, all the rest by finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fovea/expr.hpp"

#include "reference/evaluate.hpp"

namespace fovea::reference {
namespace {

const Expr kScore = arguments().score;
const Expr kA = arguments().q_idx;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double slope(const Expr& formula, double score, Position at = {}) {
  Evaluator evaluate{ScoreMod(formula)};
  at.score = score;
  evaluate(at);
  SlotValues gradients = evaluate.zeros();
  return evaluate.pull_back(1, gradients);
}

struct Curve {
  const char* text;
  std::vector<double> scores;
};
/// Every float operator, with both operands moving where there are two.
const Curve kCurves[] = {
    {"score + 2 * score - 3", {-1, 0.5}},
    {"score * score * score", {-1.5, 0, 2}},
    {"1 / score + score / (2 + score)", {-0.7, 1.3}},
    {"min(score, 2 * score) + max(score * score, 1)", {-2, 0.5, 3}},
    {"abs(score - 1)", {-1, 2}},
    {"floor(score) * score + score // 2", {-1.3, 3.7}},
    {"score % 2 + 7 % score", {1.3, 2.6}},
    {"exp(score) + exp2(score / 2)", {-1, 1}},
    {"log(score) + log2(score + 1)", {0.5, 3}},
    {"tanh(score / 2) - sigmoid(3 * score)", {-1, 0.2}},
    {"sqrt(score) + rsqrt(score + 1)", {0.5, 4}},
    {"pow(score, 2.5) + pow(score, score) + pow(2.0, score)", {0.5, 1.5}},
    {"pow(score, 3.0)", {-1.5, 2}},
    {"select(score > 0, score * score, -score)", {-1, 1}},
    {"-score * float(int(score))", {2.5}},
};

TEST(EvaluateGradient, SlopesAreThoseOfFiniteDifferences) {
  for (const Curve& curve : kCurves) {
    Evaluator f(parse_score_mod(curve.text));
    for (const double x : curve.scores) {
      const double h = 1e-4;
      const auto at = [&](double score) { return f({.score = score}); };
      const double first =
          (8 * (at(x + h) - at(x - h)) - (at(x + 2 * h) - at(x - 2 * h))) / (12 * h);
      const double second =
          (-at(x + 2 * h) + 16 * at(x + h) - 30 * at(x) + 16 * at(x - h) - at(x - 2 * h)) /
          (12 * h * h);
      at(x);
      SlotValues none;
      EXPECT_NEAR(f.pull_back(1, none), first, 1e-9 * (1 + std::fabs(first))) << curve.text << x;
      EXPECT_NEAR(f.push_forward(1, none), first, 1e-9 * (1 + std::fabs(first))) << curve.text << x;
      const Motion motion = f.derivatives_by_score();
      EXPECT_NEAR(motion.first, first, 1e-9 * (1 + std::fabs(first))) << curve.text << x;
      EXPECT_NEAR(motion.second, second, 1e-5 * (1 + std::fabs(second))) << curve.text << x;
    }
  }
}

TEST(EvaluateGradient, KinksAreAsDocumented) {
  EXPECT_EQ(slope(abs(kScore), 0), 0);
  EXPECT_EQ(slope(min(2.0 * kScore, 3.0 * kScore), 0), 2);
  EXPECT_EQ(slope(max(2.0 * kScore, 3.0 * kScore), 0), 2);
  EXPECT_EQ(slope(floor(kScore), 2), 0);
  EXPECT_EQ(slope(to_float(to_int(kScore)), 2), 0);
  EXPECT_EQ(slope(select(kScore > 0.0, 2.0 * kScore, 3.0 * kScore), 0), 3);
  EXPECT_EQ(slope(select(kScore > 0.0, 1.0, 0.0), 0), 0);
}

TEST(EvaluateGradient, InfiniteSlopesOfWhatDoesNotMatterAddNothing) {
  EXPECT_EQ(slope(select(kScore > 0.0, sqrt(kScore), kScore), 0), 1);
  EXPECT_EQ(slope(kScore + 0.0 * sqrt(kScore), 0), 1);
  EXPECT_EQ(slope(pow(kScore, 0.0), 0), 0);
  EXPECT_EQ(slope(sqrt(kScore), 0), kInfinity);
}

TEST(EvaluateGradient, SharedSubformulasAreSummed) {
  Expr sum = kScore;
  for (int i = 0; i < 40; ++i) sum = sum + sum;
  EXPECT_EQ(slope(sum, 1), 0x1p40);
}

/// Loads of a 2 x 3 matrix stored column by column; the gradient is row-major.
TEST(EvaluateGradient, LoadsPassGradientsToTheElementThatWasRead) {
  const float columns[] = {0, 10, 1, 11, 2, 12};
  const Captured table = capture("table", view(columns, {2, 3}, {1, 2}));
  Evaluator f{ScoreMod(kScore * table(kA, 1) + 5.0 * table(kA + 1, arguments().kv_idx))};
  ASSERT_EQ(f.slots().size(), 1U);
  EXPECT_EQ(f.slots()[0].num_elements, 6U);
  SlotValues gradients = f.zeros();
  f({.score = 3, .q_idx = 0, .kv_idx = -4});  // reads (0, 1) and, clamped, (1, 0)
  EXPECT_EQ(f.pull_back(2, gradients), 2);
  EXPECT_EQ(gradients[0], (std::vector<double>{0, 6, 0, 10, 0, 0}));
  f({.score = 1, .q_idx = 1, .kv_idx = 1});  // reads (1, 1) twice, once clamped
  EXPECT_EQ(f.pull_back(1, gradients), 11);
  EXPECT_EQ(gradients[0], (std::vector<double>{0, 6, 0, 10, 6, 0}));
  EXPECT_EQ(f.push_forward(2, {{0, 0, 0, 0, 1, 0}}), 2 * 11 + 6);
}

TEST(EvaluateGradient, FloatScalarsAreSlotsAndIntsAreNot) {
  const std::int32_t ints[] = {4};
  const Expr gain = scalar(CapturedScalar::of("gain", 0.25));
  const Expr count = scalar(CapturedScalar::of("count", 3));
  Evaluator f{ScoreMod(kScore * gain * count + capture("ints", view(ints, {1}))[0])};
  ASSERT_EQ(f.slots().size(), 1U);
  SlotValues gradients = f.zeros();
  f({.score = 5});
  EXPECT_EQ(f.pull_back(1, gradients), 0.75);
  EXPECT_EQ(gradients[0][0], 15);
}

TEST(EvaluateGradient, EmptyTensorsHaveNoElementToPassTo) {
  Evaluator f{ScoreMod(kScore + capture("none", view<const float>(nullptr, {0}))[kA])};
  SlotValues gradients = f.zeros();
  EXPECT_EQ(f({.score = 5}), 5);
  EXPECT_EQ(f.pull_back(1, gradients), 1);
  EXPECT_EQ(f.push_forward(1, gradients), 1);
}

TEST(EvaluateGradient, SinglePrecisionRounds) {
  Evaluator f(ScoreMod(kScore / 3.0), Precision::f32);
  SlotValues none;
  f({.score = 1});
  EXPECT_EQ(f.pull_back(1, none), static_cast<double>(1.F / 3.F));
}

}  // namespace
}  // namespace fovea::reference
