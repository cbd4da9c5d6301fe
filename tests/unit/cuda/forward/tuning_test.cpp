// Measured choices: what they are keyed by, their file, and what becomes of files that do not serve.
#include "cuda/forward/tuning.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fovea/error.hpp"
#include "fovea/mask.hpp"

#include "cuda/forward/attention_forward.hpp"
#include "unit/cuda/forward/posed.hpp"
#include "unit/cuda/jit/support.hpp"

namespace fovea::cuda {
namespace {

using testing::HasSubstr;

const DeviceTraits kHopper = typical_device(9, 0);

Winner measured(const Choice& choice, double us = 8.125, double table_us = 10.5) {
  Winner winner = winner_of(choice);
  winner.us = us;
  winner.table_us = table_us;
  return winner;
}

/// The last choice for a problem, as far from the table's as can be.
Choice last_choice(const ForwardProblem& problem, const DeviceTraits& device = kHopper) {
  return choices_of(problem, device).back();
}

Tuning tuning_of(const Posed& posed) {
  Tuning tuning;
  const ForwardProblem problem = pose(posed);
  tuning.set(kHopper, problem_class(problem), measured(last_choice(problem)));
  return tuning;
}

TuningFile file_of(const Tuning& tuning) {
  return {.where = "made.up", .tuning = tuning, .why_not = ""};
}

// ---- The key ----

TEST(ProblemClass, ReadsAsASentence) {
  EXPECT_EQ(problem_class(pose({.mask = causal()})),
            "bf16 to bf16 head_dim 128/128 group 1 seqlen_q 1024 seqlen_kv 1024 rows 16384 mask "
            "kv_idx <= q_idx + (seqlen_kv - seqlen_q)");
}

TEST(ProblemClass, OfFormulasWithoutEndIsTheirBeginning) {
  Expr score = arguments().score;
  for (int i = 0; i < 64; ++i) score = score * score;
  EXPECT_LT(problem_class(pose({.score = ScoreMod(score)})).size(), 5000U);
}

TEST(ProblemClass, LengthsWithinAPowerOfTwoAreOneClass) {
  const std::string at_1024 = problem_class(pose({}));
  EXPECT_EQ(problem_class(pose({.seqlen_q = 513, .seqlen_kv = 600})), at_1024);
  EXPECT_NE(problem_class(pose({.seqlen_q = 512})), at_1024);
  EXPECT_NE(problem_class(pose({.seqlen_kv = 1025})), at_1024);
  // Rows of all sequences and heads: how full the device is.
  EXPECT_NE(problem_class(pose({.batch = 8})), at_1024);
}

TEST(ProblemClass, WhatShapesAKernelTellsClassesApart) {
  const std::string plain = problem_class(pose({}));
  EXPECT_NE(problem_class(pose({.dtype = Dtype::f16})), plain);
  EXPECT_NE(problem_class(pose({.head_dim_v = 64})), plain);
  EXPECT_NE(problem_class(pose({.num_heads_kv = 4})), plain);
  EXPECT_NE(problem_class(pose({.score = softcap(30)})), plain);
  EXPECT_NE(problem_class(pose({.mask = window(100, 0)})), plain);
  ForwardProblem problem = pose({});
  problem.is_paged = problem.is_cached = true;
  const std::string paged = problem_class(problem);
  EXPECT_NE(paged, plain);
  problem.is_paged = false;
  EXPECT_NE(problem_class(problem), paged);
  problem.problem.dropout.p = 0.1F;
  EXPECT_THAT(problem_class(problem), HasSubstr("dropout"));
}

TEST(ProblemClass, ContentsAreNoneOfIt) {
  EXPECT_EQ(problem_class(pose({.score = softcap(30)})),
            problem_class(pose({.score = softcap(7)})));
  EXPECT_EQ(problem_class(pose({.mask = window(100, 0)})),
            problem_class(pose({.mask = window(3, 0)})));
  ForwardProblem a = pose({}), b = pose({});
  a.problem.softmax_scale = 0.1F;
  b.softmax_scale = 2;
  EXPECT_EQ(problem_class(a), problem_class(b));
}

// A plan over a cache is made for 2048 keys at least, whatever it holds when it is tuned.
TEST(ProblemClass, ShortCachesAreOneClass) {
  ForwardProblem problem = pose({.seqlen_kv = 100});
  ForwardProblem longer = pose({.seqlen_kv = 2048});
  problem.is_cached = longer.is_cached = true;
  EXPECT_EQ(problem_class(problem), problem_class(longer));
}

// ---- The choice ----

TEST(TunedChoice, WinnerIsTakenAndPlanSaysSo) {
  const ForwardProblem problem = pose({.seqlen_q = 700});
  const TuningFile file = file_of(tuning_of({}));
  const ForwardPlan plan = choose_forward(problem, kHopper, file);
  EXPECT_EQ(plan.spec, last_choice(problem).spec);
  EXPECT_TRUE(plan.is_tuned);
  EXPECT_EQ(plan.tuning, "by made.up: 8.1 us measured there, 10.5 us without");
  EXPECT_NE(plan.spec, choose_forward(problem, kHopper).spec);
}

TEST(TunedChoice, AnotherKernelMayWin) {
  const ForwardProblem problem = pose(decoding());
  const TuningFile file = file_of(tuning_of(decoding()));
  const ForwardPlan plan = choose_forward(problem, kHopper, file);
  EXPECT_NE(plan.candidate, choose_forward(problem, kHopper).candidate);
  ASSERT_FALSE(plan.refused.empty());
  EXPECT_EQ(plan.refused[0].candidate, "cuda/sm90/decode");
  EXPECT_EQ(plan.refused[0].reason, "another was measured as faster");
}

TEST(TunedChoice, OtherProblemsKeepTheTable) {
  const ForwardProblem problem = pose({.head_dim_qk = 64, .head_dim_v = 64});
  const ForwardPlan plan = choose_forward(problem, kHopper, file_of(tuning_of({})));
  EXPECT_EQ(plan.spec, choose_forward(problem, kHopper).spec);
  EXPECT_EQ(plan.tuning, "");
}

TEST(TunedChoice, OtherDevicesKeepTheTableAndSayWhy) {
  DeviceTraits smaller = kHopper;
  smaller.num_sms = 114;
  const ForwardPlan plan = choose_forward(pose({}), smaller, file_of(tuning_of({})));
  EXPECT_EQ(plan.spec, choose_forward(pose({}), smaller).spec);
  EXPECT_EQ(plan.tuning, "made.up has no measurements of compute capability 9.0 with 114 SMs");
}

TEST(TunedChoice, TileThatNoKernelHasIsIgnoredAndNamed) {
  const ForwardProblem problem = pose({});
  Winner winner = measured(last_choice(problem));
  winner.tile.tile_kv = 48;
  for (const std::string& name : {winner.candidate, std::string("cuda/sm70/attention_forward")}) {
    winner.candidate = name;
    Tuning tuning;
    tuning.set(kHopper, problem_class(problem), winner);
    const ForwardPlan plan = choose_forward(problem, kHopper, file_of(tuning));
    EXPECT_EQ(plan.spec, choose_forward(problem, kHopper).spec);
    EXPECT_THAT(plan.tuning, HasSubstr("made.up names " + name + " tile_q="));
    EXPECT_THAT(plan.tuning, HasSubstr("which this problem cannot have"));
  }
}

// Strides are not part of a class, and TMA cannot have all.
TEST(TunedChoice, ProblemsThatTheWinnerRefusesKeepTheTable) {
  const ForwardProblem dense = pose({});
  Tuning tuning;
  tuning.set(kHopper, problem_class(dense), measured(choices_of(dense, kHopper)[1]));
  ForwardProblem odd = pose({});
  odd.problem.k.strides[1] += 1;
  ASSERT_EQ(problem_class(odd), problem_class(dense));
  const ForwardPlan plan = choose_forward(odd, kHopper, file_of(tuning));
  EXPECT_EQ(plan.candidate, "cuda/sm80/attention_forward");
  EXPECT_THAT(plan.tuning, HasSubstr("which this problem cannot have"));
}

// ---- The file ----

TEST(Tuning, EveryChoiceSurvivesItsFile) {
  Tuning tuning;
  for (const DeviceTraits& device : {typical_device(8, 0), typical_device(8, 9), kHopper}) {
    for (const std::int64_t rows : {1, 40, 4096}) {
      for (const std::int64_t head_dim : {64, 96, 128, 256}) {
        Posed posed{.seqlen_q = rows, .seqlen_kv = 4096, .head_dim_qk = head_dim};
        for (const MaskMod& mask : {MaskMod(), causal(), window(3, 4) || causal()}) {
          posed.mask = mask;
          const ForwardProblem problem = pose(posed);
          for (const Choice& choice : choices_of(problem, device)) {
            const double us = 1 + 0.125 * static_cast<double>(rows + choice.spec->tile_kv);
            tuning.set(device, problem_class(problem) + " " + print_choice(winner_of(choice)),
                       measured(choice, us, 3 * us));
          }
        }
      }
    }
  }
  const Tuning read = Tuning::parse(tuning.print(), "test");
  EXPECT_EQ(read, tuning);
  EXPECT_EQ(read.print(), tuning.print());
}

TEST(Tuning, OrderOfMeasuringDoesNotShow) {
  const Winner winner = measured(last_choice(pose({})));
  Tuning forth, back;
  for (const char* name : {"a", "b", "c"}) forth.set(kHopper, name, winner);
  for (const char* name : {"c", "b", "a"}) back.set(kHopper, name, winner);
  EXPECT_EQ(forth.print(), back.print());
}

TEST(Tuning, ForgottenWinnersLeaveNothing) {
  Tuning tuning = tuning_of({});
  tuning.forget(typical_device(8, 0), problem_class(pose({})));
  tuning.forget(kHopper, "another class");
  EXPECT_NE(tuning, Tuning());
  tuning.forget(kHopper, problem_class(pose({})));
  EXPECT_EQ(tuning, Tuning());
}

std::string refusal_of(const std::string& text) {
  try {
    Tuning::parse(text, "some.tuning");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "parsed";
}

TEST(Tuning, WhatIsNoTuningIsRefusedWithItsLine) {
  EXPECT_THAT(refusal_of(""), HasSubstr("some.tuning: line 1 is ''; expected 'fovea tuning 1'"));
  EXPECT_THAT(refusal_of("{}"), HasSubstr("line 1 is '{}'"));
  EXPECT_THAT(refusal_of("fovea tuning 1\nkernels 12\n"), HasSubstr("line 2 is 'kernels 12'"));
  const std::string whole = tuning_of({}).print();
  EXPECT_THAT(refusal_of(whole + "winner\n"), HasSubstr("line 5 is 'winner'"));
  EXPECT_THAT(refusal_of(whole + "device 9.0 132\n"), HasSubstr("each device once"));
  EXPECT_THAT(refusal_of(whole + whole.substr(whole.find("winner"))), HasSubstr("each class once"));
  EXPECT_THAT(
      refusal_of(whole.substr(0, whole.find("device")) + whole.substr(whole.find("winner"))),
      HasSubstr("line 3 is 'winner"));
}

// Cut or changed anywhere, a file is refused, or says what such a file would say: no crash, no endless read.
TEST(Tuning, DamageIsSeenOrReadAsWritten) {
  const std::string whole = tuning_of({}).print();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const std::string& text :
         {whole.substr(0, i), whole.substr(0, i) + '~' + whole.substr(i + 1),
          whole.substr(0, i) + whole.substr(i + 1)}) {
      if (refusal_of(text) != "parsed") continue;
      const std::string printed = Tuning::parse(text, "test").print();
      EXPECT_EQ(Tuning::parse(printed, "test").print(), printed);
    }
  }
}

TEST(Tuning, TimesMustBeTimes) {
  const std::string whole = tuning_of({}).print();
  for (const char* us : {"nan", "inf", "-1.000", "0.000", "8.125.1", ""}) {
    std::string text = whole;
    text.replace(text.find("8.125"), 5, us);
    EXPECT_THAT(refusal_of(text), HasSubstr("line 4")) << us;
  }
}

// ---- Where it is found ----

class OpenTuning : public testing::Test {
 protected:
  std::string written(const std::string& text) const {
    jit::write_text(path, text);
    return path;
  }
  jit::TemporaryFolder folder;
  std::string path = folder / "made.tuning";
};

TEST_F(OpenTuning, NoneIsNamedAndNoneIsPacked) {
  EXPECT_EQ(open_tuning(std::nullopt, nullptr).where, "");
  jit::write_pack(path, {});
  const jit::KernelPack pack(path);
  EXPECT_EQ(open_tuning(std::nullopt, &pack).where, "");
}

TEST_F(OpenTuning, FileIsRead) {
  const TuningFile file = open_tuning(written(tuning_of({}).print()), nullptr);
  EXPECT_EQ(file.where, path);
  ASSERT_TRUE(file.tuning);
  EXPECT_EQ(*file.tuning, tuning_of({}));
}

TEST_F(OpenTuning, PackCarriesItAndAFileGoesBeforeIt) {
  const std::string pack_path = folder / "kernels.pack";
  jit::write_pack(pack_path, {}, tuning_of({}).print());
  const jit::KernelPack pack(pack_path);
  const TuningFile packed = open_tuning(std::nullopt, &pack);
  EXPECT_EQ(packed.where, pack_path);
  ASSERT_TRUE(packed.tuning);
  EXPECT_EQ(*packed.tuning, tuning_of({}));
  EXPECT_EQ(open_tuning(written(Tuning().print()), &pack).tuning, Tuning());
  EXPECT_FALSE(open_tuning(folder / "missing", &pack).tuning);
}

TEST_F(OpenTuning, WhatDoesNotServeIsToldToThePlanAndIgnored) {
  std::string stale = tuning_of({}).print();
  char& digit = stale[stale.find("kernels ") + 8];
  digit = digit == '0' ? '1' : '0';
  for (const auto& [text, words] :
       {std::pair<std::string, std::string>{"nonsense", "line 1 is 'nonsense'"},
        {stale, "measured with the kernels of another version; run fovea tune again"}}) {
    const TuningFile file = open_tuning(written(text), nullptr);
    EXPECT_FALSE(file.tuning);
    EXPECT_THAT(file.why_not, HasSubstr(words));
    const ForwardPlan plan = choose_forward(pose({}), kHopper, file);
    EXPECT_EQ(plan.spec, choose_forward(pose({}), kHopper).spec);
    EXPECT_EQ(plan.tuning, file.why_not);
  }
  EXPECT_THAT(open_tuning(folder / "missing", nullptr).why_not, HasSubstr("cannot be read"));
}

}  // namespace
}  // namespace fovea::cuda
