// Forward mode: what it refuses, and laws that need no oracle. tests/property/gradient_*_test.cpp compare it with
// the oracle.
#include "fovea/jvp.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "cpu/features.hpp"
#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// Two tiles of keys, several panels on every target, heads that share a panel.
Case small_case() {
  return {.batch = 2,
          .seqlen_q = 37,
          .seqlen_kv = 150,
          .num_heads_q = 4,
          .num_heads_kv = 2,
          .head_dim_qk = 24,
          .head_dim_v = 16,
          .mask = causal()};
}

GuardedTensor tangent_of(const TensorView& view, std::uint64_t stream) {
  TensorSpec spec =
      make_spec(Dtype::f32, {view.spec().shape.data(), static_cast<std::size_t>(view.rank())});
  GuardedTensor tangent(spec);
  tangent.fill([=](std::int64_t i) { return Random(5, stream).normal(i); });
  return tangent;
}

/// A call with a direction in everything, and its memory.
struct Call {
  explicit Call(const Case& problem)
      : memory(problem),
        q(tangent_of(memory.q.view(), 1)),
        k(tangent_of(memory.k.view(), 2)),
        v(tangent_of(memory.v.view(), 3)),
        out(make_spec(Dtype::f32, {memory.out.view().spec().shape.data(),
                                   static_cast<std::size_t>(memory.out.view().rank())})),
        lse(make_spec(Dtype::f32, {memory.lse.view().spec().shape.data(),
                                   static_cast<std::size_t>(memory.lse.view().rank())})) {
    out.poison();
    lse.poison();
    args = {.forward = memory.args(),
            .q_tangent = q.view(),
            .k_tangent = k.view(),
            .v_tangent = v.view(),
            .out_tangent = out.mutable_view(),
            .lse_tangent = lse.mutable_view()};
    args.forward.row_max = {};
  }

  std::string message() {
    try {
      attention_jvp(args);
    } catch (const Error& error) {
      return error.what();
    }
    return "(not refused)";
  }

  CaseMemory memory;
  GuardedTensor q, k, v, out, lse;
  AttentionJvp args;
};

std::vector<std::uint64_t> all_bits(const AttentionJvp& args) {
  std::vector<std::uint64_t> all;
  for (const TensorView& view : std::initializer_list<TensorView>{
           args.forward.out, args.forward.lse, args.out_tangent, args.lse_tangent}) {
    const std::vector<std::uint64_t> bits = bits_of(view);
    all.insert(all.end(), bits.begin(), bits.end());
  }
  return all;
}

TEST(Jvp, IsTheSlopeOfTheOracle) {
  Case problem = small_case();
  const TensorView slopes = problem.capture(
      Dtype::f32, {4}, [](auto i) { return 0.01 * (1.0 + static_cast<double>(i)); });
  problem.score = softcap(5) | alibi(slopes);
  problem.has_sinks = true;
  problem.dropout = {.p = 0.25F, .seed = 3};
  problem.poisons_hidden_keys = false;  // every element moves
  Call call(problem);
  GuardedTensor slopes_tangent = tangent_of(slopes, 4);
  GuardedTensor sinks_tangent = tangent_of(call.memory.sinks.view(), 5);
  call.args.captured_tangents = {
      {problem.score.captures().tensors.at(0).name, slopes_tangent.view()}};
  call.args.sinks_tangent = sinks_tangent.view();

  struct Moved {
    GuardedTensor& tensor;
    GuardedTensor& tangent;
    std::vector<double> from, direction;
  };
  std::vector<Moved> moved{{call.memory.q, call.q, {}, {}},
                           {call.memory.k, call.k, {}, {}},
                           {call.memory.v, call.v, {}, {}},
                           {call.memory.sinks, sinks_tangent, {}, {}},
                           {*problem.captured.at(0), slopes_tangent, {}, {}}};
  // On these grids every moved value is an fp32 number: the slope has the error of fp64 alone.
  constexpr double kValueGrid = 0x1p-8, kDirectionGrid = 0x1p-4;
  const double step = 0x1p-15;
  const auto round_to = [](GuardedTensor& tensor, double grid) {
    std::vector<double> values = values_of(tensor.view());
    for (double& value : values) value = std::round(value / grid) * grid;
    tensor.fill([&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
    return values;
  };
  for (Moved& each : moved) {
    each.from = round_to(each.tensor, kValueGrid);
    each.direction = round_to(each.tangent, kDirectionGrid);
  }
  attention_jvp(call.args);

  const auto at = [&](double distance) {
    for (Moved& each : moved) {
      each.tensor.fill([&](std::int64_t j) {
        const auto i = static_cast<std::size_t>(j);
        return each.from[i] + distance * each.direction[i];
      });
    }
    return reference::attention_forward(call.args.forward);
  };
  const reference::ForwardResult ahead = at(step), behind = at(-step);
  const auto expect_slope = [&](const TensorView& got, const std::vector<double>& a,
                                const std::vector<double>& b) {
    const std::vector<double> slope = values_of(got);
    ASSERT_EQ(slope.size(), a.size());
    std::vector<double> expected(a.size());
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      expected[i] = (a[i] - b[i]) / (2 * step);
      largest = std::max(largest, std::fabs(expected[i]));
    }
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(slope[i], expected[i], 1e-5 * largest) << i;  // a hundred fp32 roundings
  };
  expect_slope(call.args.out_tangent, ahead.out, behind.out);
  expect_slope(call.args.lse_tangent, ahead.lse, behind.lse);
}

TEST(Jvp, BitsDependNeitherOnThreadsNorOnBatchMates) {
  Call call(small_case());
  const auto one = make_thread_pool(1), three = make_thread_pool(3);
  call.args.forward.executor = one.get();
  attention_jvp(call.args);
  const std::vector<std::uint64_t> bits = all_bits(call.args);
  call.out.poison();
  call.args.forward.executor = three.get();
  attention_jvp(call.args);
  EXPECT_EQ(all_bits(call.args), bits);

  // The second sequence alone.
  const auto second = [](const TensorView& view) {
    TensorSpec spec = view.spec();
    spec.shape[0] = 1;
    const auto offset = view.stride(0) * static_cast<std::int64_t>(size_bytes(spec.dtype));
    return TensorView(static_cast<std::byte*>(const_cast<void*>(view.data())) + offset, spec);
  };
  AttentionJvp alone = call.args;
  for (TensorView* view : std::initializer_list<TensorView*>{
           &alone.forward.q, &alone.forward.k, &alone.forward.v, &alone.forward.out,
           &alone.forward.lse, &alone.q_tangent, &alone.k_tangent, &alone.v_tangent,
           &alone.out_tangent, &alone.lse_tangent}) {
    *view = second(*view);
  }
  const std::vector<std::uint64_t> in_batch = all_bits(alone);
  attention_jvp(alone);
  EXPECT_EQ(all_bits(alone), in_batch);
}

TEST(Jvp, TangentsThatAreNotGivenAreZero) {
  Call call(small_case());
  call.args.q_tangent = call.args.k_tangent = call.args.v_tangent = {};
  attention_jvp(call.args);
  for (const double tangent : values_of(call.args.out_tangent)) ASSERT_EQ(tangent, 0);
  for (const double tangent : values_of(call.args.lse_tangent)) ASSERT_EQ(tangent, 0);
}

TEST(Jvp, RowsThatSeeNothingHaveTangentsOfZero) {
  Case problem = small_case();
  problem.mask = mask_mod([](auto x) { return x.q_idx >= 5 && x.kv_idx <= x.q_idx; });
  Call call(problem);
  attention_jvp(call.args);
  const std::vector<double> out = values_of(call.args.out_tangent);
  const std::vector<double> lse = values_of(call.args.lse_tangent);
  const auto row = static_cast<std::size_t>(4 * 16);
  for (std::size_t i = 0; i < 5 * row; ++i) ASSERT_EQ(out[i], 0) << i;
  for (std::size_t i = 0; i < 5; ++i) ASSERT_EQ(lse[i], 0) << i;
  for (const double tangent : out) ASSERT_TRUE(std::isfinite(tangent));
  for (const double tangent : lse) ASSERT_TRUE(std::isfinite(tangent));
}

TEST(Jvp, WhatIsHiddenHasNoEffect) {
  Case problem = small_case();
  problem.mask = mask_mod([](auto x) { return x.kv_idx % 3 != 1; });
  const auto bits_with = [&](double poison) {
    Call call(problem);
    const auto spoil = [&](GuardedTensor& tensor) {
      const TensorView view = tensor.view();
      for (std::int64_t key = 1; key < problem.seqlen_kv; key += 3) {
        for (std::int64_t batch = 0; batch < view.size(0); ++batch)
          tensor.set(batch * view.stride(0) + key * view.stride(1) + 3 * view.stride(3), poison);
      }
    };
    for (GuardedTensor* tensor : {&call.memory.k, &call.memory.v, &call.k, &call.v}) spoil(*tensor);
    attention_jvp(call.args);
    return all_bits(call.args);
  };
  problem.poisons_hidden_keys = false;
  const std::vector<std::uint64_t> clean = bits_with(0);
  EXPECT_EQ(bits_with(std::numeric_limits<double>::quiet_NaN()), clean);
  EXPECT_EQ(bits_with(std::numeric_limits<double>::infinity()), clean);
}

TEST(Jvp, NanInSightReachesTheRowsThatSeeItAndOnlyThose) {
  Case problem = small_case();
  problem.seqlen_q = problem.seqlen_kv = 40;
  Call call(problem);
  const TensorView v = call.v.view();
  call.v.set(20 * v.stride(1) + 2, std::numeric_limits<double>::quiet_NaN());  // key 20, column 2
  attention_jvp(call.args);
  const std::vector<double> out = values_of(call.args.out_tangent);
  for (std::int64_t row = 0; row < 40; ++row) {
    for (std::int64_t head = 0; head < 4; ++head) {
      const auto at = static_cast<std::size_t>((row * 4 + head) * 16);
      EXPECT_EQ(std::isnan(out[at + 2]), row >= 20 && head < 2) << row << ' ' << head;
      EXPECT_FALSE(std::isnan(out[at + 1])) << row << ' ' << head;
    }
  }
}

TEST(Jvp, RefusesTangentsOfOtherShapes) {
  Call call(small_case());
  call.args.k_tangent = call.args.q_tangent;
  EXPECT_EQ(call.message(),
            "attention_jvp: k_tangent is f32 [2, 37, 4, 24]; expected f32 [2, 150, 2, 24]");
  call.args.k_tangent = call.k.view();
  call.args.out_tangent = {};
  EXPECT_EQ(call.message(), "attention_jvp: out_tangent is missing; expected f32 [2, 37, 4, 16]");
  call.args.out_tangent = call.out.mutable_view();
  call.args.sinks_tangent = call.args.q_tangent;
  EXPECT_EQ(
      call.message(),
      "attention_jvp: sinks_tangent is given without forward.sinks; expected both or neither");
}

TEST(Jvp, RefusesTangentsOfWhatIsNotCaptured) {
  Case problem = small_case();
  const TensorView slopes = problem.capture(Dtype::f32, {4}, [](auto) { return 0.1; });
  const TensorView ids = problem.capture(Dtype::i32, {37}, [](auto) { return 0.0; });
  problem.score = parse_score_mod("score + slopes[q_head] + ids[q_idx]",
                                  {.tensors = {{"slopes", slopes}, {"ids", ids}}});
  Call call(problem);
  call.args.captured_tangents = {{"slope", slopes}};
  EXPECT_EQ(call.message(),
            "attention_jvp: captured_tangents names 'slope'; expected one of 'slopes'");
  call.args.captured_tangents = {{"ids", ids}};
  EXPECT_EQ(call.message(),
            "attention_jvp: captured_tangents names 'ids', which is i32; expected a float");
  call.args.captured_tangents = {{"slopes", slopes}, {"slopes", slopes}};
  EXPECT_EQ(call.message(),
            "attention_jvp: captured_tangents names 'slopes' twice; expected each name once");
  call.args.captured_tangents = {{"slopes", call.memory.q.view()}};
  EXPECT_EQ(call.message(),
            "attention_jvp: captured_tangents 'slopes' is f32 [2, 37, 4, 24]; expected f32 [4]");
  call.args.captured_tangents = {{"slopes", slopes}};
  EXPECT_EQ(call.message(), "(not refused)");
}

TEST(Jvp, RefusesOutputsThatOverlapTangents) {
  Call call(small_case());
  call.args.out_tangent = call.args.forward.out;
  EXPECT_EQ(call.message(), "attention_jvp: out_tangent overlaps out; expected memory of its own");
}

// ---- plans ----

/// A score program that captures a table and slopes, sinks, a mask: everything that a plan prepares.
struct PlannedCall : Call {
  explicit PlannedCall(Case problem) : Call(programmed(problem)), slopes(problem.captured.at(0)) {
    slopes_tangent = tangent_of(slopes->view(), 6);
    sinks_tangent = tangent_of(memory.sinks.view(), 7);
    args.sinks_tangent = sinks_tangent.view();
    args.captured_tangents = {{"slopes", slopes_tangent.view()}};
  }

  static Case& programmed(Case& problem) {
    const TensorView view = problem.capture(
        Dtype::f32, {4}, [](auto i) { return 0.1 + 0.01 * static_cast<double>(i); });
    problem.score = parse_score_mod("score * slopes[q_head] + 0.1 * score * score",
                                    {.tensors = {{"slopes", view}}, .scalars = {}});
    problem.has_sinks = true;
    return problem;
  }

  std::shared_ptr<GuardedTensor> slopes;
  GuardedTensor slopes_tangent, sinks_tangent;
};

JvpProblem problem_for(const AttentionJvp& args, int num_threads) {
  JvpProblem problem = problem_of(args);
  problem.forward.num_threads = num_threads;
  return problem;
}

TEST(JvpPlan, GivesTheBitsOfTheCallAgainAndAgain) {
  PlannedCall call(small_case());
  attention_jvp(call.args);
  const auto expected = all_bits(call.args);
  for (const int num_threads : {1, 3}) {
    const auto pool = make_thread_pool(num_threads);
    const JvpPlan plan = plan_jvp(problem_for(call.args, num_threads));
    std::vector<std::byte> workspace(plan.workspace_bytes(), std::byte{0xff});
    call.args.workspace = workspace;
    call.args.forward.executor = pool.get();
    for (int run = 0; run < 2; ++run) {
      call.out.poison();
      plan.run(call.args);
      EXPECT_EQ(all_bits(call.args), expected);
    }
  }
}

/// A plan knows formulas, not what they read.
TEST(JvpPlan, ReadsWhatIsGivenToTheRun) {
  PlannedCall first(small_case());
  const JvpPlan plan = plan_jvp(problem_for(first.args, 1));
  Case problem = small_case();
  problem.seed = 5;
  PlannedCall second(problem);
  attention_jvp(second.args);
  const auto expected = all_bits(second.args);
  const auto pool = make_thread_pool(1);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  second.args.workspace = workspace;
  second.args.forward.executor = pool.get();
  second.out.poison();
  plan.run(second.args);
  EXPECT_EQ(all_bits(second.args), expected);
}

TEST(JvpPlan, ServesLengthsUpToItsBounds) {
  PlannedCall call(small_case());
  attention_jvp(call.args);
  const auto expected = all_bits(call.args);
  JvpProblem problem = problem_for(call.args, 1);
  problem.forward.seqlen_q = up_to(90);
  problem.forward.seqlen_kv = up_to(4000);
  const JvpPlan plan = plan_jvp(problem);
  const auto pool = make_thread_pool(1);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  call.args.workspace = workspace;
  call.args.forward.executor = pool.get();
  call.out.poison();
  plan.run(call.args);
  EXPECT_EQ(all_bits(call.args), expected);
}

TEST(JvpPlan, RefusesWhatItWasNotMadeFor) {
  PlannedCall call(small_case());
  const JvpPlan plan = plan_jvp(problem_for(call.args, 1));
  const auto pool = make_thread_pool(1), two = make_thread_pool(2);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  call.args.forward.executor = pool.get();
  call.args.workspace = workspace;
  const AttentionJvp right = call.args;
  const auto refusal = [&](const std::function<void(AttentionJvp&)>& change) {
    AttentionJvp args = right;
    change(args);
    try {
      plan.run(args);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("(not refused)");
  };
  EXPECT_EQ(refusal([](AttentionJvp&) {}), "(not refused)");
  EXPECT_EQ(refusal([](AttentionJvp& args) { args.k_tangent = {}; }),
            "attention_jvp: k_tangent is missing; the plan was made with it");
  EXPECT_EQ(refusal([](AttentionJvp& args) { args.captured_tangents.clear(); }),
            "attention_jvp: captured_tangents has other names than the plan; expected the same in "
            "the same order");
  EXPECT_EQ(refusal([&](AttentionJvp& args) { args.workspace = args.workspace.first(64); }),
            "attention_jvp: workspace has 64 bytes; expected " +
                std::to_string(plan.workspace_bytes()) + ", see JvpPlan::workspace_bytes");
  EXPECT_EQ(refusal([&](AttentionJvp& args) { args.forward.executor = two.get(); }),
            "attention_jvp: executor runs 2 workers; expected at most 1, the num_threads of the "
            "plan's problem");
}

TEST(JvpPlan, ExplainsItself) {
  PlannedCall call(small_case());
  const Explanation e = plan_jvp(problem_for(call.args, 1)).explain();
  EXPECT_EQ(e.kernel, "cpu/attention_jvp");
  EXPECT_EQ(e.compute_dtype, "f32");
  EXPECT_THAT(e.problem, HasSubstr("along q k v sinks slopes"));
  EXPECT_GT(e.workspace_bytes, 0U);
  JvpProblem problem = problem_for(call.args, 1);
  problem.forward.compute_dtype = ComputeDtype::bf16;
  problem.forward.cpu_target = CpuTarget::avx2;
  EXPECT_EQ(explain(problem).kernel, "");
  EXPECT_THAT(explain(problem).print(), HasSubstr("this target multiplies in f32"));
}

TEST(Jvp, RefusesRowMaxima) {
  Call call(small_case());
  call.args.forward.row_max = call.memory.row_max.mutable_view();
  EXPECT_EQ(call.message(), "attention_jvp: row_max is given; expected none, it has no tangent");
}

/// All keys that count lie behind the first tile and have one tangent of the score, far from that of the first keys:
/// the output does not move. Products in bf16 would round P S' if it were not centred.
TEST(Jvp, CentresTangentsOfTheScoreByAllTilesSoFar) {
  if (const std::string missing(cpu::missing_for(CpuTarget::avx512_bf16)); !missing.empty())
    GTEST_SKIP() << missing;
  constexpr std::int64_t kHeadDim = 16, kFaint = 200;
  Case problem{.batch = 1,
               .seqlen_q = 3,
               .seqlen_kv = 700,
               .num_heads_q = 1,
               .num_heads_kv = 1,
               .head_dim_qk = kHeadDim,
               .head_dim_v = kHeadDim,
               .dtype = Dtype::bf16};
  Call call(problem);
  const Random random(7, 1);
  call.memory.q.fill([](std::int64_t i) { return i % kHeadDim < 2 ? 1.0 : 0.0; });
  call.memory.k.fill([&](std::int64_t i) {
    if (i % kHeadDim == 0) return i / kHeadDim < kFaint ? -100.0 : 0.0;
    return i % kHeadDim == 1 ? random.normal(i) : 0.0;
  });
  call.k.fill(
      [](std::int64_t i) { return i % kHeadDim == 0 && i / kHeadDim >= kFaint ? 400.0 : 0.0; });
  call.args.q_tangent = call.args.v_tangent = {};
  call.args.forward.compute_dtype = ComputeDtype::bf16;
  attention_jvp(call.args);
  for (const double slope : values_of(call.args.out_tangent)) EXPECT_LT(std::abs(slope), 1e-4);
  for (const double slope : values_of(call.args.lse_tangent)) EXPECT_NEAR(slope, 100, 1e-3);
}

/// Bits tell whether products were rounded; how far they may be from the oracle, GradientPairs say.
TEST(Jvp, TakesProductsInBf16WhereTheyAreAskedFor) {
  Case problem = small_case();
  problem.dtype = Dtype::bf16;
  Call call(problem);
  const auto bits_of_run = [&](ComputeDtype compute_dtype, CpuTarget target) {
    call.args.forward.compute_dtype = compute_dtype;
    call.args.forward.cpu_target = target;
    attention_jvp(call.args);
    return all_bits(call.args);
  };
  const auto in_f32 = bits_of_run(ComputeDtype::f32, CpuTarget::automatic);
  EXPECT_EQ(bits_of_run(ComputeDtype::automatic, CpuTarget::automatic), in_f32);
  if (const std::string missing(cpu::missing_for(CpuTarget::avx512_bf16)); !missing.empty()) {
    call.args.forward.compute_dtype = ComputeDtype::bf16;
    EXPECT_THAT(call.message(), HasSubstr("avx512_bf16  " + missing));
    return;
  }
  const auto in_bf16 = bits_of_run(ComputeDtype::bf16, CpuTarget::automatic);
  EXPECT_NE(in_bf16, in_f32);
  EXPECT_EQ(bits_of_run(ComputeDtype::automatic, CpuTarget::avx512_bf16), in_bf16);
  call.args.forward.compute_dtype = ComputeDtype::bf16;
  call.args.forward.cpu_target = CpuTarget::avx2;
  EXPECT_THAT(call.message(), HasSubstr("compute_dtype is bf16 and this target multiplies in f32"));
}

}  // namespace
}  // namespace fovea::testing
