// What evaluation gives anywhere in a box lies in the interval of the box, for every node and in
// both precisions.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "expr/interval.hpp"
#include "expr/print.hpp"
#include "property/expr_formulas.hpp"

namespace fovea {
namespace {

using expr::Box;
using expr::Interval;
using expr::Node;
using testing::Evaluation;
using testing::for_random_formulas;
using testing::FormulaData;
using testing::FormulaGenerator;

using Position = std::array<double, expr::kNumVariables>;

Box random_box(FormulaGenerator& random) {
  Box box;
  for (Interval& variable : box.variables) {
    // Positions near the ends of 32 bits wrap as soon as anything is added.
    const double begin = random.below(12) == 0 ? 2147483600.0 : random.below(40) - 5;
    variable = {begin, begin + (random.below(3) == 0 ? 0 : random.below(20)), false};
  }
  // A score is fp32, and no whole number in general.
  Interval& score = box.variables[0];
  score.lo = static_cast<float>(score.lo / 4);
  score.hi = std::max<double>(score.lo, static_cast<float>(score.hi / 3));
  return box;
}

Position random_point(const Box& box, FormulaGenerator& random) {
  Position at{};
  for (std::size_t v = 0; v < at.size(); ++v) {
    const Interval& range = box.variables[v];
    const int choice = random.below(4);
    const double offset = choice == 0 ? 0 : random.below(static_cast<int>(range.hi - range.lo) + 1);
    at[v] = choice == 1 ? range.hi : range.lo + offset;
  }
  at[0] =
      std::clamp<double>(static_cast<float>(at[0] + 0.1), box.variables[0].lo, box.variables[0].hi);
  return at;
}

// The least and the greatest element that the indices reach, one element at a time.
Interval exact_bounds(const Node& load, const Interval* indices) {
  const TensorView& view = load.tensor->view;
  Interval result{std::numeric_limits<double>::infinity(),
                  -std::numeric_limits<double>::infinity()};
  const auto visit = [&](auto&& self, int dim, std::int64_t offset) -> void {
    if (dim == view.rank()) {
      const double value = testing::element(view, offset);
      result = {std::min(result.lo, value), std::max(result.hi, value), false};
      return;
    }
    const auto& range = indices[dim];
    for (auto i = static_cast<std::int64_t>(range.lo); i <= static_cast<std::int64_t>(range.hi);
         ++i) {
      self(self, dim + 1, offset + i * view.stride(dim));
    }
  };
  visit(visit, 0, 0);
  return result;
}

void expect_inside(const Node& node, const Interval& range, double value) {
  if (std::isnan(value) ? range.may_be_nan : range.contains(value)) return;
  RC_LOG() << expr::print(node) << " is " << value << ", outside [" << range.lo << ", " << range.hi
           << "]\n";
  RC_FAIL("outside its interval");
}

template <typename Real>
void expect_sound(const expr::IntervalProgram& program, const std::vector<Interval>& values,
                  const Position& at) {
  const Evaluation<Real> evaluation(*program.nodes().back(), at);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Node& node = *program.nodes()[i];
    expect_inside(node, values[i], evaluation.at(node));
  }
}

TEST(ExprInterval, ContainsEveryEvaluation) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 40);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const auto formula = generator.formula(num_steps);
      const expr::IntervalProgram program(formula);
      std::vector<Interval> values;
      for (int round = 0; round < 4; ++round) {
        Box box = random_box(generator);
        if (round % 2 == 0) box.load_bounds = exact_bounds;
        program.evaluate_all(box, values);
        RC_ASSERT(program.evaluate(box) == values.back());
        for (int point = 0; point < 8; ++point) {
          const Position at = random_point(box, generator);
          expect_sound<float>(program, values, at);
          expect_sound<double>(program, values, at);
        }
      }
    });
  });
  EXPECT_TRUE(holds);
}

TEST(ExprInterval, EvaluatingAgainIsEvaluating) {
  const FormulaData data;
  const Captures captures = data.captures();
  const bool holds = rc::check([&](std::uint32_t seed) {
    const int num_steps = *rc::gen::inRange(1, 40);
    for_random_formulas(captures, seed, [&](FormulaGenerator& generator) {
      const expr::IntervalProgram program(generator.formula(num_steps));
      Box box = random_box(generator);
      std::vector<Interval> values;
      program.evaluate_all(box, values);
      box.variables[static_cast<std::size_t>(expr::Variable::kv_idx)] = {3, 9, false};
      RC_ASSERT(program.evaluate_again(box, expr::Variable::kv_idx, values) ==
                program.evaluate(box));
    });
  });
  EXPECT_TRUE(holds);
}

}  // namespace
}  // namespace fovea
