// Derivatives of random formulas against central differences in fp64; what the forms of derivatives
// owe each other.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <optional>

#include "expr/differentiate.hpp"
#include "expr/print.hpp"
#include "property/expr_formulas.hpp"
#include "reference/evaluate.hpp"

namespace fovea {
namespace {

using expr::CapturedDerivative;
using expr::Node;
using reference::Evaluator;
using reference::Position;
using testing::Evaluation;
using testing::for_random_formulas;
using testing::FormulaData;
using testing::FormulaGenerator;
using testing::NodePtr;
using testing::Op;
using testing::Taste;

using Variables = std::array<double, expr::kNumVariables>;

Position position_of(const Variables& at) {
  const auto whole = [&](expr::Variable v) {
    return static_cast<std::int64_t>(at[static_cast<std::size_t>(v)]);
  };
  using expr::Variable;
  return {.score = at[0],
          .batch = whole(Variable::batch),
          .q_head = whole(Variable::q_head),
          .kv_head = whole(Variable::kv_head),
          .q_idx = whole(Variable::q_idx),
          .kv_idx = whole(Variable::kv_idx),
          .seqlen_q = whole(Variable::seqlen_q),
          .seqlen_kv = whole(Variable::seqlen_kv)};
}

double value(const NodePtr& formula, const Variables& at) {
  return Evaluator(ScoreMod(Expr(formula)))(position_of(at));
}

Variables random_variables(FormulaGenerator& random) {
  Variables at{};
  for (double& variable : at) variable = random.below(20);
  at[0] = random.below(64) / 16.0 - 2 + 1.0 / 128;  // away from the kinks at constants
  return at;
}

/// The formula as a function of one leaf, which becomes its score; the score that it reads is fixed.
/// So one kind of difference serves all derivatives.
NodePtr seen_from(const NodePtr& leaf, const NodePtr& root, double score) {
  const auto fixed = expr::make_scalar(
      std::make_shared<const CapturedScalar>(CapturedScalar::of("score_of_the_test", score)));
  const expr::Digest moving = expr::substitute_score(leaf, fixed)->digest;
  return expr::rewrite(expr::substitute_score(root, fixed), [&](const NodePtr& node) -> NodePtr {
    return node->digest == moving ? expr::make_variable(expr::Variable::score) : nullptr;
  });
}

/// Are differences to be trusted? No node so large or small that fp64 loses the difference of two
/// neighbours, no power of a negative base, whose derivative by the exponent is NaN by rule.
bool is_tame(const NodePtr& root, const Variables& at) {
  const Evaluation<double> evaluation(*root, at);
  for (const Node* node : expr::topological(*root)) {
    if (node->type != ExprType::floating) continue;
    const double size = std::abs(evaluation.at(*node));
    if (!(size < 1e4 && size > 1e-3)) return false;
    if (node->op == Op::pow && evaluation.at(*node->operands[0]) < 0) return false;
  }
  return true;
}

/// d formula / d score by differences; nothing where they do not converge, or where the two sides
/// disagree: at a kink or a step.
std::optional<double> difference_quotient(const NodePtr& formula, Variables at) {
  Evaluator evaluate{ScoreMod(Expr(formula))};
  const double centre = at[0];
  const auto shifted = [&](double by) {
    at[0] = centre + by;
    return evaluate(position_of(at));
  };
  const auto extrapolated = [&](double h) {
    const double wide = (shifted(h) - shifted(-h)) / (2 * h);
    const double narrow = (shifted(h / 2) - shifted(-h / 2)) / h;
    return (4 * narrow - wide) / 3;
  };
  // Right less left: shrinks with the step but at a kink.
  const auto gap = [&](double h) {
    return std::abs(shifted(h) - 2 * shifted(0) + shifted(-h)) / h;
  };
  constexpr double kStep = 1.0 / 2048;
  const double derivative = extrapolated(kStep);
  const double scale = 1 + std::abs(derivative);
  const double narrow_gap = gap(kStep / 16);
  const bool is_smooth = narrow_gap < 1e-3 * scale && narrow_gap < 0.1 * gap(kStep) + 1e-9;
  const bool is_converged = std::abs(extrapolated(kStep / 4) - derivative) < 1e-7 * scale;
  return is_smooth && is_converged ? std::optional(derivative) : std::nullopt;
}

/// The derivative at `at` is what is expected, up to the rounding of its own constants (ln 2 and the
/// like) to fp32: relative to the largest value on its way, as sums may cancel.
bool agrees(const NodePtr& derivative, const Variables& at, double expected) {
  const Evaluation<double> evaluation(*derivative, at);
  double largest = std::abs(expected);
  for (const Node* node : expr::topological(*derivative)) {
    const double size = std::abs(evaluation.at(*node));
    if (node->type == ExprType::floating && std::isfinite(size)) largest = std::max(largest, size);
  }
  return std::abs(value(derivative, at) - expected) <= 1e-6 * (1 + largest);
}

constexpr float kScalarTangent = -1.25F;

struct Counts {
  int checked = 0, moving = 0;
};

void check_by_score(const NodePtr& formula, const Variables& at, Counts& counts) {
  if (!is_tame(formula, at)) return;
  const auto expected = difference_quotient(formula, at);
  if (!expected) return;
  const NodePtr derivative = expr::derivative_by_score(formula);
  RC_LOG() << expr::print(*formula) << "\n by score: " << expr::print(*derivative) << '\n';
  RC_LOG() << value(derivative, at) << ", expected " << *expected << '\n';
  RC_ASSERT(agrees(derivative, at, *expected));
  ++counts.checked;
  counts.moving += *expected != 0 ? 1 : 0;
}

void check_by_captured(const NodePtr& formula, const Variables& at, Counts& counts) {
  if (!is_tame(formula, at)) return;
  for (const CapturedDerivative& each : expr::captured_derivatives(formula)) {
    Variables moved = at;
    moved[0] = Evaluation<double>(*each.leaf, at).at(*each.leaf);
    const auto expected = difference_quotient(seen_from(each.leaf, formula, at[0]), moved);
    if (!expected) continue;
    RC_LOG() << expr::print(*formula) << "\n by " << expr::print(*each.leaf) << ": "
             << expr::print(*each.derivative) << '\n';
    RC_ASSERT(agrees(each.derivative, at, *expected));
    ++counts.checked;
    counts.moving += *expected != 0 ? 1 : 0;
  }
}

NodePtr float_formula(FormulaGenerator& generator, int num_steps) {
  return expr::make(Op::to_float, {generator.formula(num_steps)});
}

class ExprGradient : public ::testing::TestWithParam<Taste> {
 protected:
  /// Calls property(formula, generator) for random formulas of floats.
  template <typename Property>
  bool holds_for_formulas(Property property) {
    const Captures captures = data_.captures();
    return rc::check([&](std::uint32_t seed) {
      const int num_steps = *rc::gen::inRange(1, 40);
      const auto for_one = [&](FormulaGenerator& generator) {
        property(float_formula(generator, num_steps), generator);
      };
      for_random_formulas(captures, seed, for_one, GetParam());
    });
  }

 private:
  FormulaData data_{0.15625F};
};

INSTANTIATE_TEST_SUITE_P(Formulas, ExprGradient,
                         ::testing::Values(Taste::anything, Taste::differentiable),
                         [](const ::testing::TestParamInfo<Taste>& each) {
                           return each.param == Taste::anything ? "OfAnything" : "OfFloats";
                         });

TEST_P(ExprGradient, IsTheLimitOfDifferences) {
  Counts by_score, by_captured;
  EXPECT_TRUE(holds_for_formulas([&](const NodePtr& formula, FormulaGenerator& random) {
    for (int i = 0; i < 4; ++i) {
      const Variables at = random_variables(random);
      check_by_score(formula, at, by_score);
      check_by_captured(formula, at, by_captured);
    }
  }));
  // A test that skips all its formulas would pass.
  EXPECT_GT(by_score.moving, 50);
  EXPECT_GT(by_captured.moving, 50);
}

TEST_P(ExprGradient, OfTheSecondOrderIsTheLimitOfDifferences) {
  Counts counts;
  EXPECT_TRUE(holds_for_formulas([&](const NodePtr& formula, FormulaGenerator& random) {
    const NodePtr first = expr::derivative_by_score(formula);
    for (int i = 0; i < 4; ++i) check_by_score(first, random_variables(random), counts);
  }));
  EXPECT_GT(counts.moving, 10);
}

TEST_P(ExprGradient, AlongADirectionIsTheSumOverWhatMoves) {
  int num_moving = 0;
  EXPECT_TRUE(holds_for_formulas([&](const NodePtr& formula, FormulaGenerator& random) {
    // Tensors move with their own values, as if they were scaled.
    const Captures captures = expr::collect_captures(*formula);
    std::vector<CapturedTensor> tangents = captures.tensors;
    for (const CapturedScalar& each : captures.scalars) {
      tangents.push_back({each.name, view(&kScalarTangent, {1})});
    }
    const NodePtr tangent = expr::captured_tangent(formula, tangents);
    const Variables at = random_variables(random);
    if (!is_tame(formula, at)) return;
    double expected = 0;
    for (const CapturedDerivative& each : expr::captured_derivatives(formula)) {
      const bool is_load = each.leaf->op == Op::load;
      const double speed = is_load ? value(each.leaf, at) : double{kScalarTangent};
      expected += value(each.derivative, at) * speed;
    }
    if (!std::isfinite(expected)) return;
    RC_LOG() << expr::print(*formula) << '\n';
    if (tangent == nullptr) RC_ASSERT(expr::captured_derivatives(formula).empty());
    if (tangent == nullptr) return;
    RC_ASSERT(agrees(tangent, at, expected));
    ++num_moving;
  }));
  EXPECT_GT(num_moving, 50);
}

TEST_P(ExprGradient, DoesNotSeeWhatWasNotChosen) {
  EXPECT_TRUE(holds_for_formulas([&](const NodePtr& formula, FormulaGenerator& random) {
    const NodePtr other = float_formula(random, 10);
    const NodePtr is_chosen = expr::make(Op::ge, {expr::make_variable(expr::Variable::kv_idx),
                                                  expr::make_constant(std::int64_t{0})});
    const NodePtr choice = expr::make(Op::select, {is_chosen, formula, other});
    const Variables at = random_variables(random);
    RC_LOG() << expr::print(*choice) << '\n';
    const double alone = value(expr::derivative_by_score(formula), at);
    const double chosen = value(expr::derivative_by_score(choice), at);
    RC_ASSERT(chosen == alone || (std::isnan(chosen) && std::isnan(alone)));
  }));
}

}  // namespace
}  // namespace fovea
