#include "expr/differentiate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "expr/parse.hpp"
#include "expr/passes.hpp"
#include "expr/print.hpp"
#include "formula_test_data.hpp"

namespace fovea {
namespace {

using expr::CapturedDerivative;
using expr::NodePtr;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

Captures learnable() {
  using testing::shape_only;
  return {.tensors = {{"slopes", shape_only(Dtype::f32, {8})},
                      {"bias", shape_only(Dtype::bf16, {8, 64, 64})},
                      {"table", shape_only(Dtype::f16, {8, 32})},
                      {"doc", shape_only(Dtype::i32, {64})},
                      {"flags", shape_only(Dtype::boolean, {64})}},
          .scalars = {CapturedScalar::of("cap", 30.0), CapturedScalar::of("t", 0.5),
                      CapturedScalar::of("n", 3)}};
}

NodePtr formula(const std::string& text) { return expr::parse(text, learnable(), "formula"); }

std::string by_score(const std::string& text) {
  return expr::print(*expr::derivative_by_score(formula(text)));
}

std::string by_score_twice(const std::string& text) {
  return expr::print(*expr::derivative_by_score(expr::derivative_by_score(formula(text))));
}

/// "leaf: derivative", one for each.
std::vector<std::string> by_captured(const std::string& text) {
  std::vector<std::string> result;
  for (const CapturedDerivative& each : expr::captured_derivatives(formula(text))) {
    EXPECT_EQ(each.slot, each.leaf->name);
    result.push_back(expr::print(*each.leaf) + ": " + expr::print(*each.derivative));
  }
  return result;
}

std::string tangent(const std::string& text, const std::vector<std::string>& moving) {
  using testing::shape_only;
  std::vector<CapturedTensor> tangents;
  for (const std::string& name : moving) {
    const Captures captures = learnable();
    for (const CapturedTensor& each : captures.tensors) {
      if (each.name == name) tangents.push_back(each);
    }
    for (const CapturedScalar& each : captures.scalars) {
      if (each.name == name) tangents.push_back({name, shape_only(Dtype::f32, {1, 1})});
    }
  }
  const NodePtr result = expr::captured_tangent(formula(text), tangents);
  return result ? expr::print(*result) : "nothing";
}

TEST(DerivativeByScore, IsOneRowPerOp) {
  EXPECT_EQ(by_score("score"), "1.0");
  EXPECT_EQ(by_score("t"), "0.0");
  EXPECT_EQ(by_score("score + t"), "1.0");
  EXPECT_EQ(by_score("t - score"), "-1.0");
  EXPECT_EQ(by_score("score * t"), "t");
  EXPECT_EQ(by_score("score * score"), "score + score");
  EXPECT_EQ(by_score("score / t"), "1.0 / t");
  EXPECT_EQ(by_score("t / score"), "-(t / score / score)");
  EXPECT_EQ(by_score("score // t"), "0.0");
  EXPECT_EQ(by_score("score % t"), "1.0");
  EXPECT_EQ(by_score("t % score"), "-(t // score)");
  EXPECT_EQ(by_score("-score"), "-1.0");
  EXPECT_EQ(by_score("min(score, t)"), "score <= t ? 1.0 : 0.0");
  EXPECT_EQ(by_score("max(t, score)"), "t >= score ? 0.0 : 1.0");
  EXPECT_EQ(by_score("abs(score)"), "score > 0.0 ? 1.0 : score < 0.0 ? -1.0 : 0.0");
  EXPECT_EQ(by_score("floor(score)"), "0.0");
  EXPECT_EQ(by_score("exp(score)"), "exp(score)");
  EXPECT_EQ(by_score("exp2(score)"), "exp2(score) * 0.6931472");
  EXPECT_EQ(by_score("log(score)"), "1.0 / score");
  EXPECT_EQ(by_score("log2(score)"), "1.442695 / score");
  EXPECT_EQ(by_score("tanh(score)"), "1.0 - tanh(score) * tanh(score)");
  EXPECT_EQ(by_score("sqrt(score)"), "0.5 / sqrt(score)");
  EXPECT_EQ(by_score("rsqrt(score)"), "-0.5 * (rsqrt(score) * rsqrt(score) * rsqrt(score))");
  EXPECT_EQ(by_score("sigmoid(score)"), "sigmoid(score) * (1.0 - sigmoid(score))");
  EXPECT_EQ(by_score("sin(score)"), "cos(score)");
  EXPECT_EQ(by_score("cos(score)"), "-sin(score)");
  EXPECT_EQ(by_score("tan(score)"), "1.0 + tan(score) * tan(score)");
  EXPECT_EQ(by_score("erf(score)"), "1.1283792 * exp(-(score * score))");
  EXPECT_EQ(by_score("log1p(score)"), "1.0 / (1.0 + score)");
  EXPECT_EQ(by_score("expm1(score)"), "expm1(score) + 1.0");
  EXPECT_EQ(by_score("round(score) + ceil(score) + trunc(score)"), "0.0");
  EXPECT_EQ(by_score("fmod(score, t)"), "1.0");
  EXPECT_EQ(by_score("fmod(t, score)"), "-trunc(t / score)");
  EXPECT_EQ(by_score("pow(score, 3.0)"), "3.0 * pow(score, 2.0)");
  EXPECT_EQ(by_score("pow(score, t)"), "t == 0.0 ? 0.0 : t * pow(score, t - 1.0)");
  EXPECT_EQ(by_score("pow(t, score)"), "t == 0.0 && score >= 0.0 ? 0.0 : pow(t, score) * log(t)");
  EXPECT_EQ(by_score("q_idx < 3 ? score : t"), "q_idx < 3 ? 1.0 : 0.0");
  EXPECT_EQ(by_score("score < 3 ? 1.0 : 2.0"), "0.0");
  EXPECT_EQ(by_score("float(int(score)) + slopes[int(score)]"), "0.0");
}

TEST(DerivativeByScore, OfEasyPowersNeedsNoPower) {
  EXPECT_EQ(by_score("pow(score, 0.0)"), "0.0");
  EXPECT_EQ(by_score("pow(score, 1.0)"), "1.0");
  EXPECT_EQ(by_score("pow(score, 2.0)"), "2.0 * score");
  EXPECT_EQ(by_score("pow(2.0, score)"), "pow(2.0, score) * log(2.0)");
}

TEST(DerivativeByScore, OfCommonPrograms) {
  EXPECT_EQ(by_score("cap * tanh(score / cap)"), "1.0 - tanh(score / cap) * tanh(score / cap)");
  EXPECT_EQ(by_score("score - slopes[q_head] * abs(q_idx - kv_idx)"), "1.0");
  EXPECT_EQ(by_score("score + bias[q_head, q_idx, kv_idx]"), "1.0");
  EXPECT_EQ(by_score("score * slopes[q_head]"), "slopes[q_head]");
  EXPECT_EQ(by_score("doc[q_idx] == doc[kv_idx] ? score : -inf"),
            "doc[q_idx] == doc[kv_idx] ? 1.0 : 0.0");
  EXPECT_EQ(by_score("cap * tanh((score + bias[q_head, q_idx, kv_idx]) / cap) * t"),
            "(1.0 - tanh((score + bias[q_head, q_idx, kv_idx]) / cap) * "
            "tanh((score + bias[q_head, q_idx, kv_idx]) / cap)) * t");
}

TEST(DerivativeByScore, CanBeTakenAgain) {
  EXPECT_EQ(by_score_twice("score * score * score"),
            by_score("(score + score) * score + score * score"));
  EXPECT_EQ(by_score_twice("exp(score)"), "exp(score)");
  EXPECT_EQ(by_score_twice("score + bias[q_head, q_idx, kv_idx]"), "0.0");
  EXPECT_EQ(by_score_twice("max(score * score, t)"), "score * score >= t ? 2.0 : 0.0");
}

TEST(DerivativeByScore, PassesGradientsToTheChosenSideAlone) {
  // A factor outside goes into the choice: at score 0, 0 * inf would be NaN.
  EXPECT_EQ(by_score("sqrt(score > 0.0 ? score : 0.0)"),
            "score > 0.0 ? 0.5 / sqrt(score > 0.0 ? score : 0.0) : 0.0");
  EXPECT_EQ(by_score("score > 0.0 ? sqrt(score) : 0.0"), "score > 0.0 ? 0.5 / sqrt(score) : 0.0");
  EXPECT_EQ(by_score("score > 0.0 ? sqrt(score) : t * score"),
            "score > 0.0 ? 0.5 / sqrt(score) : t");
  EXPECT_EQ(by_score("t * abs(score)"), "score > 0.0 ? t : score < 0.0 ? -t : 0.0");
}

TEST(CapturedDerivatives, AreOnePerLoadAndScalar) {
  EXPECT_THAT(by_captured("score - slopes[q_head] * abs(q_idx - kv_idx)"),
              ElementsAre("slopes[q_head]: -float(abs(q_idx - kv_idx))"));
  EXPECT_THAT(by_captured("score + bias[q_head, q_idx, kv_idx]"),
              ElementsAre("bias[q_head, q_idx, kv_idx]: 1.0"));
  EXPECT_THAT(by_captured("score * t + table[q_head, min(abs(q_idx - kv_idx), 31)]"),
              ElementsAre("t: score", "table[q_head, min(abs(q_idx - kv_idx), 31)]: 1.0"));
  EXPECT_THAT(by_captured("slopes[q_head] * slopes[kv_head] * score"),
              ElementsAre("slopes[q_head]: slopes[kv_head] * score",
                          "slopes[kv_head]: slopes[q_head] * score"));
  EXPECT_THAT(by_captured("slopes[0] * slopes[0]"),
              ElementsAre("slopes[0]: slopes[0] + slopes[0]"));
}

TEST(CapturedDerivatives, LeaveOutWhatHasNone) {
  EXPECT_THAT(by_captured("score * n + doc[q_idx]"), IsEmpty());
  EXPECT_THAT(by_captured("flags[q_idx] ? score : -inf"), IsEmpty());
  EXPECT_THAT(by_captured("t < score ? score : floor(slopes[q_head])"), IsEmpty());
  EXPECT_THAT(by_captured("score + slopes[int(t)]"), ElementsAre("slopes[int(t)]: 1.0"));
}

TEST(CapturedDerivatives, OfASoftcapByItsCap) {
  EXPECT_THAT(by_captured("cap * tanh(score / cap)"),
              ElementsAre("cap: tanh(score / cap) - score / cap / cap * "
                          "(1.0 - tanh(score / cap) * tanh(score / cap)) * cap"));
}

TEST(CapturedTangent, MovesEveryLoadOfASlot) {
  EXPECT_EQ(tangent("score + bias[q_head, q_idx, kv_idx]", {"bias"}),
            "bias_tangent[q_head, q_idx, kv_idx]");
  EXPECT_EQ(tangent("score - slopes[q_head] * abs(q_idx - kv_idx)", {"slopes"}),
            "-(slopes_tangent[q_head] * abs(q_idx - kv_idx))");
  EXPECT_EQ(tangent("slopes[q_head] * slopes[kv_head]", {"slopes"}),
            "slopes_tangent[q_head] * slopes[kv_head] + slopes_tangent[kv_head] * slopes[q_head]");
  EXPECT_EQ(tangent("score * t", {"t"}), "t_tangent[0, 0] * score");
  EXPECT_EQ(tangent("score * t + slopes[q_head]", {"t", "slopes"}),
            "t_tangent[0, 0] * score + slopes_tangent[q_head]");
}

TEST(CapturedTangent, IsNullWhereNothingMoves) {
  EXPECT_EQ(tangent("score * t", {}), "nothing");
  EXPECT_EQ(tangent("score * t", {"bias"}), "nothing");
  EXPECT_EQ(tangent("score + doc[q_idx] * n", {"doc", "n"}), "nothing");
  EXPECT_EQ(tangent("floor(slopes[q_head])", {"slopes"}), "nothing");
}

TEST(CapturedTangent, TakesANameThatIsFree) {
  using testing::shape_only;
  const Captures captures = {
      .tensors = {{"w", shape_only(Dtype::f32, {8})}, {"w_tangent", shape_only(Dtype::f32, {8})}},
      .scalars = {}};
  const auto root = expr::parse("score * w[q_head] + w_tangent[q_head]", captures, "formula");
  const auto result = expr::captured_tangent(
      root, {{"w", shape_only(Dtype::bf16, {8})}, {"w_tangent", shape_only(Dtype::f32, {8})}});
  EXPECT_EQ(expr::print(*result), "w_tangent_2[q_head] * score + w_tangent_tangent[q_head]");
  const Captures found = expr::collect_captures(*result);
  ASSERT_EQ(found.tensors.size(), 2U);
  EXPECT_EQ(found.tensors[0].view.dtype(), Dtype::bf16) << "the tangent's own type, not that of w";
}

TEST(Derivatives, OfLongFormulasStaySmall) {
  // Choices inside choices with a factor at each level: products go into few of them.
  NodePtr nested = formula("score");
  const NodePtr factor = formula("score + t");
  const NodePtr zero = expr::make_constant(0.0);
  constexpr int kLevels = 300;
  for (int level = 0; level < kLevels; ++level) {
    const NodePtr condition =
        expr::make(expr::Op::lt, {formula("kv_idx"), expr::make_constant(std::int64_t{level})});
    nested = expr::make(expr::Op::mul, {nested, factor});
    nested = expr::make(expr::Op::select, {condition, nested, zero});
  }
  EXPECT_LT(expr::topological(*expr::derivative_by_score(nested)).size(), 40U * kLevels);
}

}  // namespace
}  // namespace fovea
