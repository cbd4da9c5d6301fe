// What is chosen for gradients on GPUs, what it needs, and what is refused by name.
#include "cuda/backward/candidates.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/sm100.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/backward/sm90_wide.hpp"

namespace fovea::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Posed {
  Dtype dtype = Dtype::bf16;
  std::int64_t head_dim = 128;
  ScoreMod score{};
  MaskMod mask{};
  bool wants_dq = true, wants_dk = true, wants_dv = true, wants_dsinks = false;
  bool is_packed = false;
  int sm_margin = 0;
  float dropout_p = 0;
};

BackwardProblem problem_of(const Posed& posed) {
  const auto spec = [&](std::int64_t rows, std::int64_t heads) {
    if (posed.is_packed)
      return make_spec(posed.dtype, std::array<std::int64_t, 3>{rows, heads, posed.head_dim});
    return make_spec(posed.dtype, std::array<std::int64_t, 4>{2, rows, heads, posed.head_dim});
  };
  BackwardProblem problem;
  problem.forward.q = problem.forward.out = problem.dout = spec(300, 8);
  problem.forward.k = problem.forward.v = spec(500, 2);
  if (posed.wants_dq) problem.dq = problem.forward.q;
  if (posed.wants_dk) problem.dk = problem.forward.k;
  if (posed.wants_dv) problem.dv = problem.forward.v;
  problem.forward.score = posed.score;
  problem.forward.mask = posed.mask;
  problem.forward.has_sinks = problem.wants_dsinks = posed.wants_dsinks;
  problem.forward.sm_margin = posed.sm_margin;
  problem.forward.dropout.p = posed.dropout_p;
  if (posed.is_packed) {
    problem.forward.num_sequences = 3;
    problem.forward.seqlen_q = problem.forward.seqlen_kv = up_to(200);
  }
  return problem;
}

BackwardPlan plan_of(const Posed& posed) {
  return choose_backward(validate(problem_of(posed), "test"), typical_device(8, 0));
}

/// Where each gradient has an owner, whatever else there is.
BackwardPlan plan_of_owners(const Posed& posed) {
  return choose_backward_by(Sm80Backward::kName, validate(problem_of(posed), "test"),
                            typical_device(8, 0));
}

std::vector<KernelRole> roles_of(const BackwardPlan& plan) {
  std::vector<KernelRole> roles;
  for (const PlannedKernel& kernel : planned_kernels(plan)) roles.push_back(kernel.role);
  return roles;
}

std::string refusal_of(const BackwardPlan& plan, std::string_view candidate) {
  for (const auto& refused : plan.refused)
    if (refused.candidate == candidate) return refused.reason;
  return "not refused";
}

/// wgmma multiplies what a row does not see by 0, which NaN survives: such tiles are computed again.
TEST(BackwardCandidates, HopperComputesAgainWhereKeysAreHidden) {
  const auto roles = [](const Posed& posed) {
    const BackwardPlan plan =
        choose_backward(validate(problem_of(posed), "test"), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, "cuda/sm90/attention_backward");
    return roles_of(plan);
  };
  EXPECT_THAT(roles({}), ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare));
  EXPECT_THAT(roles({.mask = causal()}),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::redo_keys, KernelRole::redo_queries));
  EXPECT_THAT(roles({.is_packed = true}),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::convert, KernelRole::redo_keys, KernelRole::redo_queries));
  EXPECT_THAT(roles({.mask = causal(), .wants_dq = false}),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::convert, KernelRole::redo_keys));
}

/// By turns, and where each tile of queries has a CTA that adds first, and one that adds last and few besides.
TEST(BackwardCandidates, HopperWritesDqWithTheLastSum) {
  const auto finishes = [](const BackwardProblem& problem) {
    const BackwardPlan plan = choose_backward(validate(problem, "test"), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, "cuda/sm90/attention_backward");
    return plan.steps.front().spec.as<Sm90BackwardSpec>().finishes_queries;
  };
  const auto of_lengths = [](std::int64_t q, std::int64_t kv, const MaskMod& mask = {}) {
    BackwardProblem problem = problem_of({.mask = mask});
    const auto set = [](TensorSpec& spec, std::int64_t rows, std::int64_t heads) {
      spec = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{2, rows, heads, 128});
    };
    for (TensorSpec* each : {&problem.forward.q, &problem.forward.out, &problem.dout, &problem.dq})
      set(*each, q, 8);
    for (TensorSpec* each : {&problem.forward.k, &problem.forward.v, &problem.dk, &problem.dv})
      set(*each, kv, 2);
    return problem;
  };
  const MaskMod program = mask_mod([](auto x) { return x.q_idx >= x.kv_idx; });
  EXPECT_TRUE(finishes(of_lengths(300, 500)));
  EXPECT_TRUE(finishes(of_lengths(9000, 32 * 128)));
  EXPECT_TRUE(finishes(of_lengths(9000, 100)));
  for (const MaskMod& mask : {causal(), causal(Align::top_left), program})
    EXPECT_TRUE(finishes(of_lengths(9000, 9000, mask)));
  EXPECT_FALSE(finishes(of_lengths(300, 33 * 128)));
  EXPECT_FALSE(finishes(of_lengths(301, 300, causal())));
  EXPECT_FALSE(finishes(of_lengths(300, 300, window(70, 0))));
  EXPECT_FALSE(finishes(of_lengths(300, 0)));
  BackwardProblem problem = problem_of({.wants_dq = false});
  EXPECT_FALSE(finishes(problem));
  problem = problem_of({});
  problem.forward.is_deterministic = false;
  EXPECT_FALSE(finishes(problem));
  problem = problem_of({});
  problem.forward.seqlen_kv = up_to(500);  // perhaps none
  EXPECT_FALSE(finishes(problem));
}

/// Nothing reads it.
TensorView shaped(const std::vector<std::int64_t>& shape) {
  static const float nothing = 0;
  return {&nothing, make_spec(Dtype::f32, shape)};
}

/// Programs may hide keys, and dropped pairs have weights of 0: walks stay staggered, but tiles may be computed again.
TEST(BackwardCandidates, HopperTakesProgramsAndDropout) {
  for (const Posed& posed : {Posed{.score = softcap(30)}, Posed{.score = alibi(shaped({8}))},
                             Posed{.dropout_p = 0.1F}}) {
    const BackwardPlan plan =
        choose_backward(validate(problem_of(posed), "test"), typical_device(9, 0));
    EXPECT_EQ(plan.candidate, "cuda/sm90/attention_backward");
    EXPECT_THAT(roles_of(plan),
                ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                            KernelRole::redo_keys, KernelRole::redo_queries));
    const auto& spec = plan.steps.front().spec.as<Sm90BackwardSpec>();
    EXPECT_TRUE(spec.is_staggered);
    EXPECT_FALSE(spec.hides_keys);
    EXPECT_TRUE(spec.asks_redo);
    EXPECT_EQ(plan.delta.has_origins, posed.dropout_p == 0);
  }
}

/// A slope, elements of captured data for each score and dropout take registers; slopes of ALiBi and lines do not.
TEST(BackwardCandidates, HopperTakesFewerQueriesWhereProgramsNeedRegisters) {
  const auto spec_of = [](const Posed& posed) {
    const BackwardPlan plan =
        choose_backward(validate(problem_of(posed), "test"), typical_device(9, 0));
    return plan.steps.front().spec.as<Sm90BackwardSpec>();
  };
  const auto of_text = [](std::string_view text, const std::vector<std::int64_t>& shape) {
    return parse_score_mod(text, {.tensors = {{"t", shaped(shape)}}});
  };
  const auto tile_of_d64 = [&](const ScoreMod& score, float dropout_p = 0) {
    return spec_of({.head_dim = 64, .score = score, .dropout_p = dropout_p}).tile_q;
  };
  EXPECT_EQ(tile_of_d64({}), 128);
  EXPECT_EQ(tile_of_d64(alibi(shaped({8}))), 128);
  EXPECT_EQ(tile_of_d64(of_text("score + t[q_idx] * kv_idx", {300})), 128);
  EXPECT_EQ(tile_of_d64(softcap(30)), 64);
  EXPECT_EQ(tile_of_d64(of_text("score * t[q_head]", {8})), 64);
  EXPECT_EQ(tile_of_d64(bias(shaped({300, 500}))), 64);
  EXPECT_EQ(tile_of_d64({}, 0.1F), 64);
  EXPECT_TRUE(spec_of({.score = softcap(30)}).spares_registers);
  EXPECT_FALSE(spec_of({.score = alibi(shaped({8}))}).spares_registers);
}

/// dk and dv in one walk, dq in another; where keys are hidden words are cleared ahead, and sm80's three walks behind.
TEST(BackwardCandidates, WideHeadsOnHopperHaveAWalkForEachSide) {
  const auto plan_of_hopper = [](const Posed& posed) {
    return choose_backward(validate(problem_of(posed), "test"), typical_device(9, 0));
  };
  for (const std::int64_t head_dim : {136, 192, 256}) {
    const BackwardPlan plan = plan_of_hopper({.head_dim = head_dim});
    EXPECT_EQ(plan.candidate, "cuda/sm90/attention_backward_wide");
    EXPECT_EQ(refusal_of(plan, "cuda/sm90/attention_backward"),
              "head_dim_qk is " + std::to_string(head_dim) + "; expected at most 128");
    EXPECT_THAT(roles_of(plan),
                ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::queries));
    EXPECT_EQ(describe_sums(plan), "each by one CTA, in registers; the same bits in every run");
    EXPECT_EQ(product_depths(plan).qk, 4);
    EXPECT_EQ(product_depths(plan).v, 3);
    EXPECT_EQ(plan.workspace_bytes, 2U * 8 * 384 * 2 * 4);
  }
  EXPECT_THAT(
      roles_of(plan_of_hopper({.head_dim = 256, .mask = causal()})),
      ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::queries, KernelRole::prepare,
                  KernelRole::redo_keys, KernelRole::redo_values, KernelRole::redo_queries));
  EXPECT_THAT(roles_of(plan_of_hopper(
                  {.head_dim = 256, .mask = causal(), .wants_dk = false, .wants_dv = false})),
              ElementsAre(KernelRole::delta, KernelRole::queries, KernelRole::prepare,
                          KernelRole::redo_queries));
  EXPECT_EQ(plan_of_hopper({.dtype = Dtype::f32, .head_dim = 256}).candidate,
            "cuda/sm80/attention_backward_f32");
  EXPECT_EQ(plan_of_hopper({.head_dim = 264}).candidate, "cuda/sm80/attention_backward_f32");
  EXPECT_EQ(refusal_of(plan_of({.head_dim = 256}), "cuda/sm90/attention_backward_wide"),
            "compute capability is 8.0; expected 9.0");
  EXPECT_EQ(
      Sm90WideBackward::refuses(validate(problem_of({}), "test"), typical_device(9, 0))->reason,
      "head dims are 128 and 128; expected one above 128");
}

/// Q, K and their like: two stages of 64 rows at head_dim 256, where v has one beside 128 queries; three at 192 and
/// below.
TEST(BackwardCandidates, WideHeadsHaveTheStagesThatFit) {
  const auto stages_of = [](std::int64_t head_dim) {
    const BackwardPlan plan =
        choose_backward(validate(problem_of({.head_dim = head_dim}), "test"), typical_device(9, 0));
    std::vector<std::int32_t> stages;
    for (const BackwardStep& step : plan.steps) {
      const auto& spec = step.spec.as<Sm90WideBackwardSpec>();
      stages.insert(stages.end(), {spec.stages, spec.v_stages});
    }
    return stages;
  };
  EXPECT_THAT(stages_of(256), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(stages_of(192), ElementsAre(3, 3, 3, 2));
}

/// What is around the kernel is Hopper's, for tiles of 128 queries and deltas that threads subtract.
TEST(BackwardCandidates, BlackwellsKernelHasHoppersAroundIt) {
  for (const std::int64_t head_dim : {8, 64, 96, 128}) {
    const BackwardPlan plan = choose_backward_by(
        Sm100Backward::kName, validate(problem_of({.head_dim = head_dim}), "test"),
        typical_device(10, 0));
    EXPECT_THAT(roles_of(plan),
                ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare));
    const auto& spec = plan.steps.front().spec.as<Sm100BackwardSpec>();
    const std::int32_t padded = head_dim <= 64 ? 64 : 128;
    EXPECT_EQ(spec.head_dim_qk, padded);
    EXPECT_EQ(spec.stages, padded == 64 ? 3 : 2);
    EXPECT_LE(plan.shared_bytes, static_cast<std::size_t>(plan.device.shared_bytes_per_cta));
    EXPECT_LE(sm100_backward_tensor_layout(spec).columns, kSm100Columns);
    EXPECT_EQ(sm100_backward_tensor_layout(spec).is_dq_over_ds, padded == 128);
    EXPECT_EQ(delta_bytes(spec), 4);
    EXPECT_TRUE(spec.is_staggered && spec.finishes_queries);
    EXPECT_EQ(tile_of(plan).q, 128);
    EXPECT_EQ(product_depths(plan).qk, 3);
    EXPECT_THAT(describe_sums(plan), HasSubstr("dq in the order of keys, in "));
  }
  EXPECT_THAT(roles_of(choose_backward_by(Sm100Backward::kName,
                                          validate(problem_of({.is_packed = true}), "test"),
                                          typical_device(10, 3))),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::convert, KernelRole::redo_keys, KernelRole::redo_queries));
}

/// Until a GPU has seen it a plan takes it by a measurement alone.
TEST(BackwardCandidates, BlackwellsKernelStandsBehindSm80s) {
  EXPECT_EQ(choose_backward(validate(problem_of({}), "test"), typical_device(10, 0)).candidate,
            "cuda/sm80/attention_backward_one_walk");
  const auto reason = [](const Posed& posed, int major, int minor) {
    const auto refusal =
        Sm100Backward::refuses(validate(problem_of(posed), "test"), typical_device(major, minor));
    return refusal ? refusal->reason : "";
  };
  EXPECT_EQ(reason({}, 10, 0), "");
  EXPECT_EQ(reason({.score = softcap(30), .dropout_p = 0.1F}, 10, 3), "");
  EXPECT_EQ(reason({}, 9, 0), "compute capability is 9.0; expected 10.0 or 10.3");
  EXPECT_EQ(reason({}, 12, 0), "compute capability is 12.0; expected 10.0 or 10.3");
  EXPECT_EQ(reason({.head_dim = 136}, 10, 0), "head_dim_qk is 136; expected at most 128");
}

TEST(BackwardCandidates, OrderOfSumsIsSaid) {
  BackwardProblem problem = problem_of({});
  const auto sums = [&](const DeviceTraits& device) {
    return describe_sums(choose_backward(validate(problem, "test"), device));
  };
  EXPECT_THAT(sums(typical_device(9, 0)), HasSubstr("dq in the order of keys, in "));
  problem.forward.is_deterministic = false;
  EXPECT_THAT(sums(typical_device(9, 0)), HasSubstr("dq in any order, in "));
  EXPECT_THAT(sums(typical_device(8, 0)), HasSubstr("dq in any order, in "));
  problem.forward.is_deterministic = true;
  EXPECT_THAT(sums(typical_device(8, 0)), HasSubstr("dq in the order of keys, in "));
  EXPECT_EQ(sums(typical_device(8, 6)),
            "each by one CTA, in registers; the same bits in every run");
  EXPECT_EQ(describe_sums(plan_of(
                {.wants_dq = false, .wants_dk = false, .wants_dv = false, .wants_dsinks = true})),
            "");
}

/// Five products for seven, and a float for each element of dq; where rows hide keys, tiles may be computed again.
TEST(BackwardCandidates, OneWalkSumsDqInMemory) {
  const std::string one_walk = "cuda/sm80/attention_backward_one_walk";
  const auto plan_of_any_order = [](const Posed& posed) {
    BackwardProblem problem = problem_of(posed);
    problem.forward.is_deterministic = false;
    return choose_backward(validate(problem, "test"), typical_device(8, 0));
  };
  for (const std::int64_t head_dim : {64, 96, 128, 256}) {
    const BackwardPlan plan = plan_of_any_order({.head_dim = head_dim});
    EXPECT_EQ(plan.candidate, one_walk);
    EXPECT_THAT(roles_of(plan), ElementsAre(KernelRole::delta, KernelRole::main,
                                            KernelRole::prepare, KernelRole::convert));
    EXPECT_EQ(product_depths(plan).qk, 3);
    EXPECT_EQ(product_depths(plan).v, 2);
    EXPECT_EQ(plan.workspace_bytes, 2U * 8 * 384 * (2 + static_cast<std::size_t>(head_dim)) * 4);
  }
  EXPECT_THAT(roles_of(plan_of_any_order({.mask = causal()})),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                          KernelRole::convert, KernelRole::redo_keys, KernelRole::redo_queries));
  const BackwardPlan without_dv = plan_of_any_order({.wants_dv = false});
  EXPECT_EQ(without_dv.candidate, "cuda/sm80/attention_backward");
  EXPECT_EQ(refusal_of(without_dv, one_walk),
            "one of dq, dk and dv is not wanted; walks for the others alone are less work");
}

/// By turns: staggered walks have two sums of dq, others one; a word for each tile of keys.
TEST(BackwardCandidates, OneWalkTakesTurnsUpTo128) {
  const std::string one_walk = "cuda/sm80/attention_backward_one_walk";
  const auto aligned = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  constexpr std::size_t kRows = std::size_t{2} * 8 * 384, kKeyTiles = 2 * 2 * 4,
                        kQueryTiles = 2 * 8 * 3;
  const BackwardPlan full = plan_of({});
  EXPECT_EQ(full.candidate, one_walk);
  EXPECT_TRUE(full.steps.front().spec.as<Sm80BackwardSpec>().is_staggered);
  EXPECT_EQ(full.workspace_bytes, aligned(4 * (kRows * (2 + 2 * 128) + kKeyTiles)));
  EXPECT_EQ(plan_of({.head_dim = 64}).steps.front().spec.owner()->tile_walked, 128);  // just fits
  const BackwardPlan masked = plan_of({.mask = causal()});
  EXPECT_FALSE(masked.steps.front().spec.as<Sm80BackwardSpec>().is_staggered);
  EXPECT_EQ(masked.workspace_bytes,
            aligned(4 * (kRows * (2 + 128) + kKeyTiles + 2 + kKeyTiles + kQueryTiles)));
  const BackwardPlan wide = plan_of({.head_dim = 256});
  EXPECT_EQ(wide.candidate, "cuda/sm80/attention_backward");
  EXPECT_EQ(refusal_of(wide, one_walk),
            "head dims are 256 and 256; above 128 dq is summed in any order, and "
            "is_deterministic is set");
  const BackwardPlan small =
      choose_backward(validate(problem_of({}), "test"), typical_device(8, 6));
  EXPECT_EQ(small.candidate, "cuda/sm80/attention_backward");
  EXPECT_EQ(refusal_of(small, one_walk),
            "a CTA takes 131616 bytes of shared memory; the device has 101376");
}

TEST(BackwardCandidates, BothGradientsOfKeysShareAWalkUpTo128) {
  EXPECT_THAT(roles_of(plan_of_owners({})),
              ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::queries));
  EXPECT_THAT(
      roles_of(plan_of({.head_dim = 256})),
      ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::values, KernelRole::queries));
}

TEST(BackwardCandidates, WhatIsNotWantedHasNoKernel) {
  EXPECT_THAT(roles_of(plan_of({.wants_dk = false, .wants_dv = false})),
              ElementsAre(KernelRole::delta, KernelRole::queries));
  EXPECT_THAT(roles_of(plan_of({.wants_dq = false, .wants_dk = false})),
              ElementsAre(KernelRole::delta, KernelRole::values));
  EXPECT_THAT(roles_of(plan_of(
                  {.wants_dq = false, .wants_dk = false, .wants_dv = false, .wants_dsinks = true})),
              ElementsAre(KernelRole::delta, KernelRole::sinks));
}

TEST(BackwardCandidates, F32AndWideHeadsAreMultipliedPlainly) {
  const std::string plain = "cuda/sm80/attention_backward_f32";
  const BackwardPlan f32 = plan_of({.dtype = Dtype::f32});
  EXPECT_EQ(f32.candidate, plain);
  EXPECT_EQ(refusal_of(f32, "cuda/sm80/attention_backward"),
            "inputs are f32; expected f16 or bf16");
  const BackwardPlan wide = plan_of({.head_dim = 320});
  EXPECT_EQ(wide.candidate, plain);
  EXPECT_THAT(refusal_of(wide, "cuda/sm80/attention_backward"), HasSubstr("head_dim_qk is 320"));
}

/// Every captured tensor's gradient is wanted, and nothing else.
BackwardPlan captured_plan(const ScoreMod& score, Dtype dtype = Dtype::bf16) {
  BackwardProblem problem = problem_of(
      {.dtype = dtype, .score = score, .wants_dq = false, .wants_dk = false, .wants_dv = false});
  for (const CapturedTensor& each : score.captures().tensors) {
    const std::span shape(each.view.spec().shape.data(),
                          static_cast<std::size_t>(each.view.rank()));
    problem.dcaptured.push_back({each.name, make_spec(Dtype::f32, shape)});
  }
  return choose_backward(validate(problem, "test"), typical_device(8, 0));
}

TEST(BackwardCandidates, ADenseBiasIsStoredTileByTile) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{300, 500}, {8, 300, 500}, {2, 8, 301, 512}, {2, 1, 300, 500}}) {
    const BackwardPlan plan = captured_plan(bias(shaped(shape)));
    EXPECT_THAT(roles_of(plan), ElementsAre(KernelRole::delta, KernelRole::captured_tiles));
    EXPECT_EQ(plan.workspace_bytes, 2U * 8 * 384 * 3 * 4);
  }
}

TEST(BackwardCandidates, OtherCapturesHaveAnExactSumForEachElement) {
  const auto expect_sums = [](const ScoreMod& score, std::size_t num_sums) {
    const BackwardPlan plan = captured_plan(score);
    EXPECT_THAT(roles_of(plan), ElementsAre(KernelRole::delta, KernelRole::clear_sums,
                                            KernelRole::write_sums, KernelRole::captured_sums));
    EXPECT_EQ(plan.memory.tables_at - plan.memory.captured_at,
              (num_sums * sizeof(ExactSum) + 255) / 256 * 256);
  };
  // The last key stands for two.
  expect_sums(parse_score_mod("score + bias[q_head, q_idx, kv_idx]",
                              {.tensors = {{"bias", shaped({8, 300, 499})}}}),
              8 * 300 * 499);
  expect_sums(bias(shaped({8, 1, 500})), 8 * 500);
  const Arguments x = arguments();
  expect_sums(relative_bias(shaped({8, 33}), x.q_idx - x.kv_idx), 8 * 33);
  expect_sums(parse_score_mod("score + t[q_idx, kv_idx, q_idx]",
                              {.tensors = {{"t", shaped({300, 500, 300})}}}),
              300 * 500 * 300);
  expect_sums(parse_score_mod("score + t[q_idx, kv_idx] + t[0, 0]",
                              {.tensors = {{"t", shaped({300, 500})}}}),
              300 * 500);
}

/// Factors of a row may have a sign in common, and then an error of delta grows with them.
TEST(BackwardCandidates, DeltaIsSummedAgainWhereCapturesAreMultiplied) {
  const ScoreMod slopes =
      parse_score_mod("score - slopes[q_head] * kv_idx", {.tensors = {{"slopes", shaped({8})}}});
  const BackwardPlan plan = captured_plan(slopes);
  EXPECT_THAT(roles_of(plan),
              ElementsAre(KernelRole::delta, KernelRole::captured_deltas, KernelRole::clear_sums,
                          KernelRole::write_sums, KernelRole::captured_sums));
  EXPECT_EQ(plan.memory.tables_at - plan.memory.captured_at, 2U * 8 * 384 * 4 + 1024);
  EXPECT_THAT(roles_of(captured_plan(slopes, Dtype::f32)),
              ElementsAre(KernelRole::delta, KernelRole::clear_sums, KernelRole::write_sums,
                          KernelRole::captured_sums));
}

TEST(BackwardCandidates, StepsOfCapturesAreToldWithTheirMemory) {
  const ScoreMod score =
      parse_score_mod("score + bias[q_head, q_idx, kv_idx] - slopes[q_head] * kv_idx",
                      {.tensors = {{"bias", shaped({8, 300, 500})}, {"slopes", shaped({8})}}});
  BackwardProblem problem = problem_of({.score = score});
  problem.dcaptured = {{"bias", make_spec(Dtype::bf16, std::array<std::int64_t, 3>{8, 300, 500})},
                       {"slopes", make_spec(Dtype::f32, std::array<std::int64_t, 1>{8})}};
  const GradientProblem g = validate(problem, "test");
  EXPECT_EQ(describe(g, choose_backward(g, typical_device(9, 0)).captured),
            "sm80/captured_deltas in 24576 bytes, sm80/captured_sums of 'slopes' in 1024 bytes, "
            "sm90/sum_pairs of 'bias' in 5242880 bytes");
}

/// Where dS, rounded as products take it, is what the bias gets, Hopper's kernel leaves it; tiles that were not finite
/// are computed again.
TEST(BackwardCandidates, ABiasLearnsFromTheDsOfHopper) {
  struct Learned {
    const char* text = "score + bias[q_head, q_idx, kv_idx]";
    std::array<std::int64_t, 3> shape{8, 300, 500};
    Dtype dtype = Dtype::bf16, gradient_dtype = Dtype::bf16;
    bool is_packed = false;
    float dropout_p = 0;
  };
  const auto plan_of_bias = [](const Learned& of) {
    const ScoreMod score = parse_score_mod(
        of.text, {.tensors = {{"bias", shaped({of.shape[0], of.shape[1], of.shape[2]})}}});
    BackwardProblem problem = problem_of(
        {.dtype = of.dtype, .score = score, .is_packed = of.is_packed, .dropout_p = of.dropout_p});
    problem.dcaptured = {{"bias", make_spec(of.gradient_dtype, of.shape)}};
    return choose_backward(validate(problem, "test"), typical_device(9, 0));
  };
  const BackwardPlan plan = plan_of_bias({});
  EXPECT_THAT(roles_of(plan), ElementsAre(KernelRole::delta, KernelRole::main, KernelRole::prepare,
                                          KernelRole::redo_keys, KernelRole::redo_queries,
                                          KernelRole::sum_pairs, KernelRole::captured_tiles));
  EXPECT_EQ(plan.memory.tables_at - plan.memory.captured_at,
            2U * 8 * 5 * 4 * 64 * 128 * 2);  // tiles of all heads of both sequences
  EXPECT_EQ(product_depths(plan).qk, 3);     // no walk of its own
  const auto sums_pairs = [&](const Learned& of) { return plan_of_bias(of).captured.sums_pairs; };
  EXPECT_TRUE(sums_pairs({.text = "bias[0, q_idx, kv_idx] + score", .shape = {1, 301, 512}}));
  EXPECT_TRUE(sums_pairs({.gradient_dtype = Dtype::f32}));
  EXPECT_TRUE(sums_pairs({.dropout_p = 0.1F}));
  EXPECT_TRUE(sums_pairs({.dtype = Dtype::f16, .gradient_dtype = Dtype::f16}));
  EXPECT_FALSE(sums_pairs({.dtype = Dtype::f16, .gradient_dtype = Dtype::f32}));
  EXPECT_FALSE(sums_pairs({.text = "score - bias[q_head, q_idx, kv_idx]"}));
  EXPECT_FALSE(sums_pairs({.text = "score + bias[q_head, q_idx, kv_idx] * 2"}));
  EXPECT_FALSE(sums_pairs({.text = "30 * tanh(score / 30) + bias[q_head, q_idx, kv_idx]"}));
  EXPECT_FALSE(sums_pairs({.text = "score + bias[q_head, q_idx, kv_idx] + bias[0, 0, 0]"}));
  EXPECT_FALSE(sums_pairs({.shape = {8, 300, 499}}));  // the last key stands for two
  EXPECT_FALSE(sums_pairs({.is_packed = true}));
}

/// Pairs of all sequences and heads: 2 GiB at most.
TEST(BackwardCandidates, PairsThatWouldFillMemoryAreNotKept) {
  const auto sums_pairs = [](std::int64_t batch) {
    const auto spec = make_spec(Dtype::bf16, std::array<std::int64_t, 4>{batch, 2048, 32, 64});
    BackwardProblem problem;
    problem.forward.q = problem.forward.k = problem.forward.v = problem.forward.out = spec;
    problem.dout = problem.dq = problem.dk = problem.dv = spec;
    problem.forward.score = bias(shaped({32, 2048, 2048}));
    problem.dcaptured = {{problem.forward.score.captures().tensors[0].name,
                          make_spec(Dtype::bf16, std::array<std::int64_t, 3>{32, 2048, 2048})}};
    return choose_backward(validate(problem, "test"), typical_device(9, 0)).captured.sums_pairs;
  };
  EXPECT_TRUE(sums_pairs(8));
  EXPECT_FALSE(sums_pairs(9));
}

/// More than kernels take can be captured only where the formula reads none of it.
TEST(BackwardCandidates, TooManyGradientsOfCapturesAreRefused) {
  std::string sum = "0.0";
  fovea::Captures captures;
  for (int i = 0; i < 17; ++i) {
    captures.scalars.push_back(CapturedScalar::of("s" + std::to_string(i), 0.5));
    sum += " + s" + std::to_string(i);
  }
  BackwardProblem problem =
      problem_of({.score = parse_score_mod("1 > 0 ? score : " + sum, captures)});
  for (const CapturedScalar& each : captures.scalars)
    problem.dcaptured.push_back({each.name, make_spec(Dtype::f32, std::array<std::int64_t, 1>{1})});
  const BackwardPlan plan = choose_backward(validate(problem, "test"), typical_device(8, 0));
  EXPECT_EQ(plan.candidate, "");
  EXPECT_THAT(
      plan.refused[0].reason,
      HasSubstr("gradients of 17 captured tensors and scalars are wanted; expected at most 16"));
}

/// Of what the formula does not depend on: zeros are written, and nothing is walked.
TEST(BackwardCandidates, GradientsOfWhatHasNoEffectAreZeros) {
  const ScoreMod score =
      parse_score_mod("score + floor(t[q_idx])", {.tensors = {{"t", shaped({300})}}});
  EXPECT_THAT(roles_of(captured_plan(score)),
              ElementsAre(KernelRole::delta, KernelRole::clear_sums, KernelRole::write_sums));
}

TEST(BackwardCandidates, SmsLeftFreeAreRefused) {
  const BackwardPlan plan = plan_of({.sm_margin = 8});
  EXPECT_EQ(plan.candidate, "");
  EXPECT_THAT(plan.refused[0].reason, HasSubstr("sm_margin is 8"));
}

TEST(BackwardCandidates, WorkspaceIsTwoOrThreeFloatsOfEachPaddedRow) {
  EXPECT_EQ(plan_of_owners({}).workspace_bytes, 2U * 8 * 384 * 2 * 4);
  EXPECT_EQ(plan_of_owners({.score = softcap(30)}).workspace_bytes, 2U * 8 * 384 * 3 * 4);
  // Packed: every sequence begins at a multiple of 128.
  EXPECT_EQ(plan_of_owners({.is_packed = true}).workspace_bytes, 8U * (384 + 5 * 128) * 2 * 4);
}

TEST(BackwardCandidates, PackedSequencesHaveRoomForTheirPadding) {
  const std::array<std::int64_t, 5> begins{0, 1, 129, 257, 300};
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t rows = (begins[i + 1] - begins[i] + 127) / 128 * 128;
    EXPECT_GE(statistics_begin(begins[i + 1], at + 1), statistics_begin(begins[i], at) + rows);
    EXPECT_EQ(statistics_begin(begins[i], at) % kStatisticsRows, 0);
  }
}

/// A call whose tensors nobody reads, all at `memory`.
AttentionBackward call_of(const GradientProblem& problem, std::uint16_t* memory) {
  const auto tensor = [&](const TensorSpec& spec) { return TensorView(memory, spec); };
  AttentionBackward args;
  args.forward.q = tensor(problem.forward.problem.q);
  args.forward.k = tensor(problem.forward.problem.k);
  args.forward.v = tensor(problem.forward.problem.v);
  args.forward.out = tensor(problem.forward.problem.out);
  args.dout = tensor(problem.dout);
  args.dq = tensor(problem.dq);
  args.dk = tensor(problem.dk);
  args.dv = tensor(problem.dv);
  return args;
}

TEST(BackwardLaunch, EveryOwnedTileOfEveryHeadHasACta) {
  const GradientProblem problem = validate(problem_of({.wants_dsinks = true}), "test");
  const BackwardPlan plan = choose_backward_by(Sm80Backward::kName, problem, typical_device(8, 0));
  alignas(16) std::uint16_t memory[8] = {};
  AttentionBackward args = call_of(problem, memory);
  float sinks[8] = {};
  args.dsinks = view(sinks, {8});
  const BackwardLaunch launch = backward_launch(problem, plan, args, memory);
  EXPECT_EQ(launch.num_delta_ctas, 2U * 8 * 3);
  EXPECT_EQ(launch.num_ctas[0], 2U * 2 * 4);  // 500 keys, 128 each
  EXPECT_EQ(launch.num_ctas[1], 2U * 8 * 3);  // 300 queries
  EXPECT_EQ(launch.num_sink_ctas, 8U);
  EXPECT_EQ(launch.launches(plan).size(), 4U);
}

/// Words are cleared ahead of the walks that set them; all but the first kernel start while the one before ends.
TEST(BackwardLaunch, WalksOfWideHeadsComeBetweenClearedWordsAndTilesAgain) {
  const GradientProblem problem = validate(problem_of({.head_dim = 256, .mask = causal()}), "test");
  const BackwardPlan plan = choose_backward(problem, typical_device(9, 0));
  alignas(256) std::uint16_t memory[128] = {};
  const auto encode = [](const driver::TensorMapSpec&, const void*) { return TensorMapParam{}; };
  const Sm90WideBackwardLaunch call =
      Sm90WideBackward::prepare(problem, plan, call_of(problem, memory), memory, encode);
  std::vector<KernelRole> roles;
  std::vector<unsigned> ctas;
  for (const KernelLaunch& launch : call.launches(plan)) {
    EXPECT_EQ(launch.is_pdl, !roles.empty());
    roles.push_back(launch.role);
    ctas.push_back(launch.grid.x);
  }
  EXPECT_THAT(roles, ElementsAre(KernelRole::delta, KernelRole::prepare, KernelRole::main,
                                 KernelRole::queries, KernelRole::redo_keys,
                                 KernelRole::redo_values, KernelRole::redo_queries));
  EXPECT_THAT(ctas,
              ElementsAre(2 * 8 * 3, 1, 2 * 2 * 8, 2 * 8 * 3, 2 * 2 * 4, 2 * 2 * 4, 2 * 8 * 3));
  // A word for each 128 keys and 128 queries of each head, and two for all.
  EXPECT_EQ(call.clear.count, 2 + 2 * 2 * 4 + 2 * 8 * 3);
  EXPECT_EQ(call.redo[3].params.redo_keys.num_owned, 2 * 2 * 4);
}

}  // namespace
}  // namespace fovea::cuda
