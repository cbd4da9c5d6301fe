// Tuning by a made-up clock: what becomes of verdicts in the file, and when two kernels' results are too far apart.
#include "tuner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "core/shape.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "kernel_difference.hpp"
#include "progress.hpp"

namespace fovea::tools {
namespace {

using testing::HasSubstr;

/// Contender `fast` takes 8 us, every other 10.
struct OneIsFast : Track {
  std::size_t fast = 0;
  std::string why_default_is_out{};
  int runs_left = 1'000'000;

  explicit OneIsFast(std::size_t contender) : fast(contender) {}
  std::string why_out(std::size_t contender) override {
    return contender == 0 ? why_default_is_out : contender == 3 ? "is wrong" : "";
  }
  double seconds(std::size_t contender) override {
    --runs_left;
    return contender == fast ? 8e-6 : 10e-6;
  }
  bool is_over() override { return runs_left <= 0; }
};

struct MadeUp : TunedProblem {
  ForwardProblem problem{};
  std::vector<cuda::Choice> made_of{};
};

MadeUp problem_of(std::int64_t seqlen) {
  const TensorSpec spec = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{1, seqlen, 8, 128});
  MadeUp tuned;
  tuned.name = "made up";
  tuned.problem = validate({.q = spec, .k = spec, .v = spec}, "test");
  tuned.problem_class = cuda::problem_class(tuned.problem);
  tuned.device = cuda::typical_device(9, 0);
  tuned.made_of = choices_of(tuned.problem, tuned.device);
  for (const cuda::Choice& choice : tuned.made_of) tuned.choices.push_back(winner_of(choice));
  return tuned;
}

cuda::ForwardPlan plan_by(const cuda::Tuning& tuning, const MadeUp& tuned) {
  return choose_forward(tuned.problem, tuned.device,
                        cuda::TuningFile{.where = "x", .tuning = tuning, .why_not = ""});
}

TEST(Tune, WinnerIsWhatPlansTakeAfterwards) {
  const MadeUp tuned = problem_of(1024);
  for (const std::size_t fast : {std::size_t{1}, std::size_t{2}, tuned.choices.size() - 1}) {
    cuda::Tuning tuning;
    OneIsFast track(fast);
    const TuneRow row = tune(tuned, track, 1, tuning);
    EXPECT_EQ(row.verdict.winner, fast);
    EXPECT_EQ(row.choices[fast], print_choice(tuned.choices[fast]));
    const cuda::Tuning read = cuda::Tuning::parse(tuning.print(), "test");
    EXPECT_EQ(plan_by(read, tuned).spec, tuned.made_of[fast].spec);
    EXPECT_EQ(plan_by(read, tuned).candidate, tuned.made_of[fast].candidate->name);
    const cuda::Winner* winner = read.find(tuned.device, row.problem_class);
    ASSERT_NE(winner, nullptr);
    EXPECT_NEAR(winner->us, 8, 1e-9);
    EXPECT_NEAR(winner->table_us, 10, 1e-9);
  }
}

TEST(Tune, ProblemsOfTheClassShareIt) {
  cuda::Tuning tuning;
  OneIsFast track(2);
  tune(problem_of(1024), track, 1, tuning);
  EXPECT_EQ(tile_of(plan_by(tuning, problem_of(800)).spec),
            tile_of(problem_of(1024).made_of[2].spec));
  EXPECT_EQ(plan_by(tuning, problem_of(1025)).spec, problem_of(1025).made_of[0].spec);
}

TEST(Tune, AWrongKernelIsReportedAndNeverKept) {
  cuda::Tuning tuning;
  OneIsFast track(3);
  const TuneRow row = tune(problem_of(1024), track, 1, tuning);
  ASSERT_EQ(row.verdict.out.size(), 1U);
  EXPECT_EQ(row.verdict.out[0].reason, "is wrong");
  EXPECT_EQ(tuning, cuda::Tuning());
}

TEST(Tune, AgainRefreshesWhatItMeasuresAndNothingElse) {
  cuda::Tuning tuning;
  OneIsFast second(2), first(1), table(0);
  tune(problem_of(1024), second, 1, tuning);
  tune(problem_of(4096), second, 1, tuning);
  tune(problem_of(1024), first, 1, tuning);
  EXPECT_EQ(plan_by(tuning, problem_of(1024)).spec, problem_of(1024).made_of[1].spec);
  EXPECT_EQ(plan_by(tuning, problem_of(4096)).spec, problem_of(4096).made_of[2].spec);
  tune(problem_of(1024), table, 1, tuning);
  EXPECT_EQ(plan_by(tuning, problem_of(1024)).spec, problem_of(1024).made_of[0].spec);
  EXPECT_EQ(plan_by(tuning, problem_of(1024)).tuning, "");
  EXPECT_EQ(plan_by(tuning, problem_of(4096)).spec, problem_of(4096).made_of[2].spec);
}

TEST(Tune, WhatIsUndecidedStays) {
  cuda::Tuning tuning;
  OneIsFast track(2);
  tune(problem_of(1024), track, 1, tuning);
  const cuda::Tuning before = tuning;
  OneIsFast late(0), broken(1);
  late.runs_left = 10;
  broken.why_default_is_out = "does not compile";
  EXPECT_FALSE(tune(problem_of(1024), late, 1, tuning).verdict.is_decided);
  EXPECT_FALSE(tune(problem_of(1024), broken, 1, tuning).verdict.is_decided);
  EXPECT_EQ(tuning, before);
}

TEST(Tune, ProblemThatAllRefuseIsNotDecided) {
  MadeUp tuned = problem_of(64);
  tuned.choices.clear();
  cuda::Tuning tuning;
  OneIsFast track(0);
  EXPECT_FALSE(tune(tuned, track, 1, tuning).verdict.is_decided);
}

TEST(Tune, TimeIsSharedAmongProblemsThatAreLeft) {
  EXPECT_EQ(share_of_time(60, 3), 20);
  EXPECT_EQ(share_of_time(60, 1), 60);
  EXPECT_EQ(share_of_time(-1, 4), 0);
}

TEST(Progress, BarFills) {
  EXPECT_EQ(bar(0, 3), "[--------------------] 0/3");
  EXPECT_EQ(bar(1, 2), "[##########----------] 1/2");
  EXPECT_EQ(bar(7, 7), "[####################] 7/7");
}

// ---- Two kernels' results ----

/// Rows of a problem of `keys` keys, as a kernel gives them that rounds to bf16 at the end.
struct Attention {
  std::vector<std::vector<float>> probabilities, values;

  Attention(std::size_t rows, std::size_t keys) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < rows; ++i) {
      std::vector<float>& p = probabilities.emplace_back(keys);
      for (float& each : p) each = std::exp(normal(random));
    }
    for (std::size_t i = 0; i < keys; ++i) {
      std::vector<float>& v = values.emplace_back(16);
      for (float& each : v) each = normal(random);
    }
  }

  /// Row i sees keys [0, i + seen_more).
  KernelResults causal(std::size_t seen_more, bool rounds) const {
    const auto round = [&](float x) { return rounds ? static_cast<float>(bfloat16(x)) : x; };
    KernelResults results;
    for (std::size_t i = 0; i < probabilities.size(); ++i) {
      std::vector<float> sums(16);
      float sum = 0;
      for (std::size_t k = 0; k < std::min(i + seen_more, values.size()); ++k) {
        sum += probabilities[i][k];
        for (std::size_t d = 0; d < 16; ++d) sums[d] += round(probabilities[i][k]) * values[k][d];
      }
      for (const float each : sums) results.out.push_back(round(each / sum));
      results.lse.push_back(std::log(sum));
    }
    return results;
  }
};

TEST(KernelDifference, RoundingIsAllowedAndAKeyTooManyIsNot) {
  const Attention attention(512, 513);
  const KernelResults right = attention.causal(1, true);
  EXPECT_EQ(why_differs(attention.causal(1, false), right, Dtype::bf16, 4), "");
  EXPECT_EQ(why_differs(right, attention.causal(1, false), Dtype::bf16, 4), "");
  EXPECT_THAT(why_differs(attention.causal(2, true), right, Dtype::bf16, 4), HasSubstr("out"));
  EXPECT_THAT(why_differs(attention.causal(1, false), attention.causal(1, true), Dtype::f32, 4),
              HasSubstr("out"));
}

TEST(KernelDifference, WhatIsNotFiniteMustBeEqual) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const KernelResults empty_row{{0, 0}, {-kInfinity}};
  EXPECT_EQ(why_differs(empty_row, empty_row, Dtype::bf16, 1), "");
  EXPECT_EQ(why_differs({{nan, 0}, {1}}, {{nan, 0}, {1}}, Dtype::bf16, 1), "");
  EXPECT_THAT(why_differs({{nan, 0}, {1}}, {{1, 0}, {1}}, Dtype::bf16, 1),
              HasSubstr("element 0 of out is nan"));
  EXPECT_THAT(why_differs({{0, 0}, {-50}}, empty_row, Dtype::bf16, 1), HasSubstr("lse"));
  EXPECT_THAT(why_differs({{0, 0}, {kInfinity}}, empty_row, Dtype::bf16, 1), HasSubstr("lse"));
}

TEST(KernelDifference, GradientsMayDifferByRoundingsAndNotByAKey) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::vector<double> exact(4096), rounded, one_more;
  for (double& each : exact) each = normal(random);
  for (const double each : exact) {
    rounded.push_back(static_cast<double>(float(bfloat16(static_cast<float>(each)))));
    one_more.push_back(each + 0.05 * normal(random));  // of some hundred keys
  }
  EXPECT_EQ(why_gradients_differ({exact, rounded}, {rounded, exact}, Dtype::bf16), "");
  EXPECT_THAT(why_gradients_differ({exact, one_more}, {exact, exact}, Dtype::bf16),
              HasSubstr("dk"));
  EXPECT_THAT(why_gradients_differ({rounded}, {exact}, Dtype::f32), HasSubstr("dq"));
}

}  // namespace
}  // namespace fovea::tools
