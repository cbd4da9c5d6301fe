// An accuracy in place of a recipe: what is chosen, by whom it is refused, and that results are those of the choice.
#include "plan/recipe_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fovea/backward.hpp"

#include "support/case.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Problem within(float accuracy) {
  Problem problem;
  problem.quant.accuracy = accuracy;
  return problem;
}

std::string everything_runs(const Problem& /*problem*/) { return ""; }

std::vector<std::string> names_of(const std::vector<Explanation::Refused>& refused) {
  std::vector<std::string> names;
  for (const Explanation::Refused& each : refused) names.push_back(each.candidate);
  return names;
}

bool plan_can_run(const Problem& problem) { return !explain(problem).kernel.empty(); }

TEST(RecipeChoice, IsTheFastestWithinTheAccuracy) {
  const RecipeChoice coarse = choose_recipe(within(.05F), everything_runs);
  EXPECT_EQ(coarse.quant, parse_quantization("fast"));
  EXPECT_EQ(coarse.why, "fast: its error is 0.045, 0.05 is allowed");
  EXPECT_TRUE(coarse.refused.empty());

  const RecipeChoice fine = choose_recipe(within(.012F), everything_runs);
  EXPECT_EQ(fine.quant, parse_quantization("accurate"));
  ASSERT_THAT(names_of(fine.refused), ElementsAre("quant fast", "quant int8"));
  EXPECT_EQ(fine.refused[0].reason, "its error is 0.045; 0.012 is allowed");

  const RecipeChoice none = choose_recipe(within(.001F), everything_runs);
  EXPECT_TRUE(none.quant.is_none());
  EXPECT_EQ(none.why, "none: no recipe is within 0.001 and faster here");
  EXPECT_THAT(names_of(none.refused), ElementsAre("quant fast", "quant int8", "quant accurate"));
}

TEST(RecipeChoice, PassesWhatDoesNotRunFaster) {
  const auto only_accurate = [](const Problem& problem) -> std::string {
    return problem.quant == parse_quantization("accurate") ? "" : "sm90/attention: no such kernel";
  };
  const RecipeChoice choice = choose_recipe(within(.05F), only_accurate);
  EXPECT_EQ(choice.quant, parse_quantization("accurate"));
  EXPECT_EQ(choice.refused.at(0).reason, "sm90/attention: no such kernel");
}

TEST(RecipeChoice, IsTheNamedRecipeWithoutAnAccuracy) {
  Problem problem;
  problem.quant = parse_quantization("sage2");
  const RecipeChoice choice = choose_recipe(problem, everything_runs);
  EXPECT_EQ(choice.quant, problem.quant);
  EXPECT_EQ(choice.why, "");
}

TEST(RecipeChoice, IsExplainedByPlansAndProblems) {
  CaseMemory memory(Case{});
  Problem problem = problem_of(memory.args());
  problem.quant.accuracy = .05F;
  for (const Explanation& e : {explain(problem), plan(problem).explain()}) {
    EXPECT_EQ(e.quant, "none: no recipe is within 0.05 and faster here");
    ASSERT_GE(e.refused.size(), 3U);
    EXPECT_EQ(e.refused[0].candidate, "quant fast");
    EXPECT_THAT(e.refused[0].reason, HasSubstr("rows share a kv head; it is faster from 1024 on"));
    EXPECT_THAT(e.print(), HasSubstr("quant      none: no recipe"));
    EXPECT_THAT(e.json(), HasSubstr(R"("quant": "none: no recipe)"));
  }
  EXPECT_EQ(explain(problem_of(memory.args())).quant, "");
}

TEST(RecipeChoice, OnTheCpuIsTheOneWhoseProductsAreAllOfEightBits) {
  Case c;
  c.seqlen_q = 1024;
  CaseMemory memory(c);
  Problem problem = problem_of(memory.args());
  problem.quant.accuracy = .05F;
  problem.cpu_target = CpuTarget::scalar;
  const Explanation plain = explain(problem);
  EXPECT_THAT(plain.quant, HasSubstr("none"));
  EXPECT_EQ(plain.refused.at(1).candidate, "quant int8");
  EXPECT_EQ(plain.refused.at(1).reason, "products of f32 on scalar are no faster");

  for (const CpuTarget target : {CpuTarget::avx512_vnni, CpuTarget::avx_vnni}) {
    problem.cpu_target = target;
    problem.quant = parse_quantization("int8");
    const bool is_there = plan_can_run(problem);
    problem.quant = {.accuracy = .05F};
    EXPECT_EQ(explain(problem).quant.starts_with("int8"), is_there) << name(target);
  }
}

TEST(RecipeChoice, OfNoneHasTheBitsOfNoRecipe) {
  CaseMemory memory(Case{});
  AttentionForward args = memory.args();
  attention_forward(args);
  const auto out = bits_of(args.out);
  args.quant.accuracy = .05F;
  attention_forward(args);
  EXPECT_EQ(bits_of(args.out), out);
}

TEST(RecipeChoice, LeavesGradientsWithoutOne) {
  CaseMemory memory(Case{});
  AttentionForward forward = memory.args();
  forward.quant.accuracy = .05F;
  const AttentionBackward backward{.dout = forward.out, .forward = forward, .dq = forward.q};
  EXPECT_EQ(explain(problem_of(backward)).kernel, "cpu/attention_backward");
}

}  // namespace
}  // namespace fovea::testing
