// Short sequences on Hopper, by its own kernel and by sm_80's: with the registers that let several CTAs share an SM
// nothing spills, products are there once, whatever the number of stages, and none waits for another's end.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "fovea/attention.hpp"
#include "fovea/mask.hpp"

#include "compile/cuda/compiler.hpp"
#include "compile/cuda/sass.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/sm80_short.hpp"
#include "cuda/forward/sm90_short.hpp"
#include "problem/forward.hpp"
#include "support/plan_without.hpp"

namespace fovea::cuda {
namespace {

struct Short {
  const char* name;
  std::int64_t seqlen, head_dim;
  std::int64_t num_heads_q = 8;  // on 8 kv heads
  MaskMod mask{};
  ScoreMod score{};
  float dropout = 0;
  bool is_packed = false;
  bool wants_row_max = false;
  bool is_hoppers = false;  // by its own kernel
  int most_spilled = 0;     // bytes that were measured as cheaper than a CTA less
};

void PrintTo(const Short& each, std::ostream* out) { *out << each.name; }

ForwardPlan plan_of(const Short& each) {
  const auto spec = [&](std::int64_t heads) {
    if (each.is_packed)
      return make_spec(Dtype::bf16, std::array{64 * each.seqlen, heads, each.head_dim});
    return make_spec(Dtype::bf16, std::array{std::int64_t{64}, each.seqlen, heads, each.head_dim});
  };
  Problem problem;
  problem.q = spec(each.num_heads_q);
  problem.k = problem.v = spec(8);
  problem.wants_lse = true;
  problem.wants_row_max = each.wants_row_max;
  problem.mask = each.mask;
  problem.score = each.score;
  problem.dropout.p = each.dropout;
  if (each.is_packed) {
    problem.num_sequences = 64;
    problem.seqlen_q = problem.seqlen_kv = up_to(each.seqlen);
  }
  const ForwardProblem validated = validate(problem, "test");
  if (each.is_hoppers) return choose_forward(validated, typical_device(9, 0));
  return testing::plan_without({Sm90ForwardShort::kName}, validated, typical_device(9, 0));
}

class ShortSpecsOf : public ::testing::TestWithParam<Short> {};

const jit::Cubin& main_kernel(const ForwardPlan& plan) {
  return compiled(planned_kernels(plan).front().text, {.major = 9, .minor = 0});
}

TEST_P(ShortSpecsOf, SpillNothing) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of(GetParam());
  ASSERT_EQ(plan.candidate,
            GetParam().is_hoppers ? Sm90ForwardShort::kName : Sm80ForwardShort::kName);
  const jit::CompileReport& report = main_kernel(plan).report;
  EXPECT_LE(report.spill_bytes, GetParam().most_spilled);
  EXPECT_EQ(report.log.find("Potential Performance Loss"), std::string::npos) << report.log;
}

TEST(ShortSpecs, HaveProductsOfOneStage) {
  if (const auto reason = why_no_compiler()) GTEST_SKIP() << *reason;
  const ForwardPlan plan = plan_of({.name = "", .seqlen = 257, .head_dim = 32});
  ASSERT_EQ(plan.spec->stages, 3);
  const auto code = machine_code(main_kernel(plan));
  if (!code) GTEST_SKIP() << "compiled, but not looked at: no nvdisasm";
  const ForwardSpec& spec = *plan.spec;
  EXPECT_EQ(count(*code, "HMMA."),
            spec.head_dim_qk / 16 * (spec.tile_kv / 8) + spec.tile_kv / 16 * (spec.head_dim_v / 8));
}

INSTANTIATE_TEST_SUITE_P(
    All, ShortSpecsOf,
    ::testing::Values(
        Short{"d64_49", 49, 64}, Short{"d64_77", 77, 64}, Short{"d64_112", 112, 64},
        Short{"d64_128", 128, 64}, Short{"d72_77", 77, 72}, Short{"d80_113", 113, 80},
        Short{"d128_77", 77, 128}, Short{"d128_128", 128, 128},
        Short{.name = "d32_33_row_max", .seqlen = 33, .head_dim = 32, .wants_row_max = true},
        Short{.name = "d64_49_row_max", .seqlen = 49, .head_dim = 64, .wants_row_max = true},
        Short{.name = "d32_288_causal", .seqlen = 288, .head_dim = 32, .mask = causal()},
        Short{.name = "d64_77_causal", .seqlen = 77, .head_dim = 64, .mask = causal()},
        Short{.name = "d128_32_group",
              .seqlen = 32,
              .head_dim = 128,
              .num_heads_q = 32,
              .mask = causal()},
        Short{.name = "d64_113_softcap", .seqlen = 113, .head_dim = 64, .score = softcap(30)},
        Short{.name = "d64_77_window_dropout",
              .seqlen = 77,
              .head_dim = 64,
              .mask = window(20, 10),
              .dropout = 0.5F,
              .wants_row_max = true},
        Short{.name = "d128_77_dropout", .seqlen = 77, .head_dim = 128, .dropout = 0.1F},
        Short{.name = "d64_128_packed",
              .seqlen = 128,
              .head_dim = 64,
              .mask = causal(),
              .is_packed = true,
              .wants_row_max = true},
        Short{.name = "d96_128_packed",
              .seqlen = 128,
              .head_dim = 96,
              .mask = causal(),
              .is_packed = true},
        Short{.name = "hopper_d64_49", .seqlen = 49, .head_dim = 64, .is_hoppers = true},
        Short{.name = "hopper_d32_77", .seqlen = 77, .head_dim = 32, .is_hoppers = true},
        Short{.name = "hopper_d128_77", .seqlen = 77, .head_dim = 128, .is_hoppers = true},
        Short{.name = "hopper_d64_197", .seqlen = 197, .head_dim = 64, .is_hoppers = true},
        Short{.name = "hopper_d80_112", .seqlen = 112, .head_dim = 80, .is_hoppers = true},
        Short{.name = "hopper_d80_192", .seqlen = 192, .head_dim = 80, .is_hoppers = true},
        // A warp of the last rows.
        Short{.name = "hopper_d80_197",
              .seqlen = 197,
              .head_dim = 80,
              .is_hoppers = true,
              .most_spilled = 80},
        Short{.name = "hopper_d72_197_causal",
              .seqlen = 197,
              .head_dim = 72,
              .mask = causal(),
              .is_hoppers = true,
              .most_spilled = 80},
        // Persistent, beside a mask.
        Short{.name = "hopper_d64_77_causal",
              .seqlen = 77,
              .head_dim = 64,
              .mask = causal(),
              .is_hoppers = true},
        Short{.name = "hopper_d128_320", .seqlen = 320, .head_dim = 128, .is_hoppers = true},
        Short{.name = "hopper_d64_384_causal",
              .seqlen = 384,
              .head_dim = 64,
              .mask = causal(),
              .is_hoppers = true},
        Short{.name = "hopper_d72_384_causal",
              .seqlen = 384,
              .head_dim = 72,
              .mask = causal(),
              .wants_row_max = true,
              .is_hoppers = true},
        Short{.name = "hopper_d128_384_causal",
              .seqlen = 384,
              .head_dim = 128,
              .mask = causal(),
              .wants_row_max = true,
              .is_hoppers = true},
        // A ring.
        Short{.name = "hopper_d80_384_causal",
              .seqlen = 384,
              .head_dim = 80,
              .mask = causal(),
              .is_hoppers = true,
              .most_spilled = 80},
        Short{.name = "hopper_d64_321_window",
              .seqlen = 321,
              .head_dim = 64,
              .mask = window(100, 7),
              .is_hoppers = true},
        Short{.name = "hopper_d32_272_causal",
              .seqlen = 272,
              .head_dim = 32,
              .mask = causal(),
              .is_hoppers = true},
        Short{.name = "hopper_d64_197_causal",
              .seqlen = 197,
              .head_dim = 64,
              .mask = causal(),
              .is_hoppers = true,
              .most_spilled = 72},
        Short{.name = "hopper_d128_272_packed",
              .seqlen = 272,
              .head_dim = 128,
              .mask = causal(),
              .is_packed = true,
              .wants_row_max = true,
              .is_hoppers = true}),
    [](const auto& each) { return std::string(each.param.name); });

}  // namespace
}  // namespace fovea::cuda
