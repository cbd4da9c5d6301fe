// Simplified formulas give the same bits: NaN stays NaN, -0 stays -0.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "expr/print.hpp"
#include "property/expr_formulas.hpp"

namespace fovea {
namespace {

using testing::Evaluation;
using testing::for_random_formulas;
using testing::FormulaData;
using testing::FormulaGenerator;

bool same_bits(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

std::array<double, expr::kNumVariables> random_position(FormulaGenerator& random) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr std::array<float, 8> kScores = {0.0F, -0.0F, 1.0F, -2.5F, 1e30F, kInf, -kInf, 0.3F};
  std::array<double, expr::kNumVariables> at{};
  for (double& variable : at) variable = random.below(20);
  const int score = random.below(9);
  at[0] = score == 8 ? std::nan("") : double{kScores[static_cast<std::size_t>(score)]};
  return at;
}

TEST(ExprSimplify, KeepsTheBitsOfEveryEvaluation) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 40);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto formula = generator.formula(num_steps);
      const auto simple = expr::simplify(formula);
      RC_LOG() << expr::print(*formula) << "\n" << expr::print(*simple) << '\n';
      RC_ASSERT(simple->type == formula->type);
      for (int i = 0; i < 10; ++i) {
        const auto at = random_position(generator);
        const double expected = Evaluation<float>(*formula, at).at(*formula);
        RC_ASSERT(same_bits(Evaluation<float>(*simple, at).at(*simple), expected));
      }
    });
  });
  EXPECT_TRUE(holds);
}

TEST(ExprSimplify, IsDoneAfterOnePass) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 40);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto simple = expr::simplify(generator.formula(num_steps));
      RC_LOG() << expr::print(*simple) << "\n" << expr::print(*expr::simplify(simple)) << '\n';
      RC_ASSERT(expr::simplify(simple)->digest == simple->digest);
    });
  });
  EXPECT_TRUE(holds);
}

TEST(ExprStructuralKey, DoesNotDependOnNames) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 40);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto formula = generator.formula(num_steps);
      const auto renamed =
          expr::rename_slots(formula, [](const std::string& name) { return "other_" + name; });
      RC_ASSERT(expr::structural_key(renamed) == expr::structural_key(formula));
    });
  });
  EXPECT_TRUE(holds);
}

}  // namespace
}  // namespace fovea
