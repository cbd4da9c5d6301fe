// Kernels and tiles that gradients may be tuned to, and what plans make of measured ones.
#include "cuda/backward/choices.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>

#include "fovea/mask.hpp"

namespace fovea::cuda {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Posed {
  Dtype dtype = Dtype::bf16;
  std::int64_t head_dim = 128, seqlen = 512;
  ScoreMod score{};
  bool wants_dq = true, wants_keys = true, is_deterministic = true;
};

GradientProblem pose(const Posed& posed) {
  const TensorSpec spec =
      make_spec(posed.dtype, std::array<std::int64_t, 4>{1, posed.seqlen, 4, posed.head_dim});
  BackwardProblem problem{
      .forward = {.q = spec, .k = spec, .v = spec, .out = spec, .score = posed.score},
      .dout = spec};
  problem.forward.is_deterministic = posed.is_deterministic;
  if (posed.wants_dq) problem.dq = spec;
  if (posed.wants_keys) problem.dk = problem.dv = spec;
  return validate(problem, "test");
}

const DeviceTraits kHopper = typical_device(9, 0), kAmpere = typical_device(8, 0);

Winner timed(Winner winner) {
  winner.us = 8.125;
  winner.table_us = 10.5;
  return winner;
}

TuningFile file_of(const GradientProblem& problem, const Winner& winner,
                   const DeviceTraits& device) {
  Tuning tuning;
  tuning.set(device, problem_class(problem), timed(winner));
  return {.where = "made.up", .tuning = Tuning::parse(tuning.print(), "test"), .why_not = ""};
}

std::vector<AnyBackwardSpec> specs_of(const std::vector<BackwardStep>& steps) {
  std::vector<AnyBackwardSpec> specs;
  for (const BackwardStep& step : steps) specs.push_back(step.spec);
  return specs;
}

TEST(BackwardChoices, TheTablesIsFirstAndEachIsThereOnce) {
  for (const DeviceTraits& device : {kAmpere, typical_device(8, 6), kHopper}) {
    for (const Posed& posed :
         {Posed{}, Posed{.head_dim = 64}, Posed{.head_dim = 256}, Posed{.dtype = Dtype::f32},
          Posed{.score = softcap(30)}, Posed{.wants_dq = false}}) {
      const GradientProblem problem = pose(posed);
      const std::vector<BackwardChoice> choices = choices_of(problem, device);
      ASSERT_GT(choices.size(), 1U);
      const BackwardPlan table = choose_backward(problem, device);
      EXPECT_EQ(choices.front().candidate->name, table.candidate);
      EXPECT_EQ(specs_of(choices.front().steps), specs_of(table.steps));
      std::set<std::string> seen;
      for (const BackwardChoice& choice : choices) {
        EXPECT_TRUE(seen.insert(print_choice(winner_of(choice))).second);
        EXPECT_EQ(choice.candidate->refuses(problem, device), std::nullopt);
        for (const BackwardStep& step : choice.steps)
          EXPECT_LE(step.shared_bytes, static_cast<std::size_t>(device.shared_bytes_per_cta));
      }
    }
  }
}

TEST(BackwardChoices, EveryPartHasTilesOfItsOwn) {
  const std::vector<BackwardChoice> choices = choices_of(pose({.head_dim = 256}), kAmpere);
  std::set<std::int32_t> of_dk, of_dv, of_dq;
  for (const BackwardChoice& choice : choices) {
    if (choice.candidate->name != "cuda/sm80/attention_backward") continue;
    ASSERT_EQ(choice.steps.size(), 3U);
    of_dk.insert(choice.steps[0].spec.owner()->tile_owned);
    of_dv.insert(choice.steps[1].spec.owner()->tile_owned);
    of_dq.insert(choice.steps[2].spec.owner()->tile_owned);
  }
  for (const auto& tiles : {of_dk, of_dv, of_dq}) EXPECT_EQ(tiles, (std::set{64, 128}));
}

TEST(BackwardChoices, WithoutKernelsOfRowsThereIsNothingToChoose) {
  BackwardProblem problem{.forward = pose({}).forward.problem, .dout = pose({}).dout};
  problem.forward.has_sinks = problem.wants_dsinks = true;
  EXPECT_THAT(choices_of(validate(problem, "test"), kAmpere), IsEmpty());
}

TEST(BackwardTuning, EveryWinnerIsTakenByPlansAndSurvivesItsFile) {
  for (const DeviceTraits& device : {kAmpere, kHopper}) {
    for (const Posed& posed : {Posed{}, Posed{.head_dim = 256}, Posed{.dtype = Dtype::f32}}) {
      const GradientProblem problem = pose(posed);
      for (const BackwardChoice& choice : choices_of(problem, device)) {
        const BackwardPlan plan =
            choose_backward(problem, device, file_of(problem, winner_of(choice), device));
        EXPECT_TRUE(plan.is_tuned);
        EXPECT_EQ(plan.candidate, choice.candidate->name);
        EXPECT_EQ(specs_of(plan.steps), specs_of(choice.steps));
        EXPECT_EQ(plan.tuning, "by made.up: 8.1 us measured there, 10.5 us without");
        EXPECT_EQ(plan.workspace_bytes, plan_choice(problem, device, choice).workspace_bytes);
      }
    }
  }
}

TEST(BackwardTuning, AnotherKernelMayWin) {
  const GradientProblem problem = pose({});
  const BackwardChoice last = choices_of(problem, kHopper).back();
  const BackwardPlan plan =
      choose_backward(problem, kHopper, file_of(problem, winner_of(last), kHopper));
  EXPECT_NE(plan.candidate, "cuda/sm90/attention_backward");
  ASSERT_FALSE(plan.refused.empty());
  EXPECT_EQ(plan.refused[0].reason, "another was measured as faster");
}

TEST(BackwardTuning, OtherClassesAndTilesThatNoKernelHasKeepTheTable) {
  const GradientProblem problem = pose({});
  Winner winner = winner_of(choices_of(problem, kAmpere).back());
  const GradientProblem longer = pose({.seqlen = 4096});
  EXPECT_EQ(choose_backward(longer, kAmpere, file_of(problem, winner, kAmpere)).tuning, "");
  winner.more_tiles.back().tile_q = 48;
  const BackwardPlan plan = choose_backward(problem, kAmpere, file_of(problem, winner, kAmpere));
  EXPECT_FALSE(plan.is_tuned);
  EXPECT_THAT(plan.tuning, HasSubstr("which this problem cannot have"));
}

TEST(BackwardTuning, ClassesSayWhatIsWantedAndInWhatOrder) {
  EXPECT_EQ(problem_class(pose({})),
            "gradients of q k v: bf16 to bf16 head_dim 128/128 group 1 seqlen_q 512 seqlen_kv 512 "
            "rows 2048");
  EXPECT_THAT(problem_class(pose({.wants_dq = false})), HasSubstr("gradients of k v: "));
  EXPECT_THAT(problem_class(pose({.is_deterministic = false})), HasSubstr(" in any order: "));
  EXPECT_NE(problem_class(pose({})), problem_class(pose({}).forward));
}

}  // namespace
}  // namespace fovea::cuda
