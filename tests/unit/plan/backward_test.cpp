// Plans of gradients: exact workspace, refusals by name, explain, the cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "fovea/mask.hpp"

#include "cpu/features.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"
#include "support/compare.hpp"
#include "support/gradient_case.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// Two chunks of keys, uneven work, a captured tensor.
GradientCase small_case() {
  Case problem{.batch = 2,
               .seqlen_q = 19,
               .seqlen_kv = 550,
               .num_heads_q = 4,
               .num_heads_kv = 2,
               .head_dim_qk = 24,
               .head_dim_v = 16,
               .mask = causal()};
  problem.score = alibi(problem.capture(
      Dtype::f32, {4}, [](std::int64_t i) { return 0.01 * static_cast<double>(i + 1); }));
  return {.forward = problem};
}

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(not refused)";
}

BackwardProblem problem_for(const AttentionBackward& args, int num_threads) {
  BackwardProblem problem = problem_of(args);
  problem.forward.num_threads = num_threads;
  return problem;
}

std::vector<std::uint64_t> bits_of_run(const BackwardPlan& plan, const AttentionBackward& args) {
  plan.run(args);
  std::vector<std::uint64_t> bits;
  for (const TensorView* view : std::initializer_list<const TensorView*>{
           &args.dq, &args.dk, &args.dv, &args.dcaptured[0].view}) {
    const auto more = bits_of(*view);
    bits.insert(bits.end(), more.begin(), more.end());
  }
  return bits;
}

TEST(BackwardPlanWorkspace, IsEnoughAtEveryMisalignment) {
  GradientMemory memory(small_case());
  attention_forward(memory.forward.args());
  const auto pool = make_thread_pool(2);
  AttentionBackward args = memory.args();
  args.executor = pool.get();
  const BackwardPlan plan = plan_backward(problem_for(args, 2));
  constexpr std::size_t kGuard = 256;
  std::vector<std::byte> buffer(plan.workspace_bytes() + 2 * kGuard + 64);
  std::vector<std::uint64_t> expected;
  for (std::size_t shift = 0; shift < 64; shift += 7) {  // 7: bytes, words and lines are all met
    std::fill(buffer.begin(), buffer.end(), std::byte{0xA5});
    const std::span<std::byte> all(buffer);
    args.workspace = all.subspan(kGuard + shift, plan.workspace_bytes());
    const auto bits = bits_of_run(plan, args);
    if (expected.empty()) expected = bits;
    EXPECT_TRUE(bits == expected) << shift;
    const auto is_guard = [](std::byte b) { return b == std::byte{0xA5}; };
    EXPECT_TRUE(std::ranges::all_of(all.first(kGuard + shift), is_guard)) << shift;
    EXPECT_TRUE(std::ranges::all_of(all.subspan(kGuard + shift + plan.workspace_bytes()), is_guard))
        << shift;
  }
}

TEST(BackwardPlanWorkspace, OneByteLessIsRefused) {
  GradientMemory memory(small_case());
  attention_forward(memory.forward.args());
  const auto pool = make_thread_pool(1);
  AttentionBackward args = memory.args();
  args.executor = pool.get();
  const BackwardPlan plan = plan_backward(problem_for(args, 1));
  std::vector<std::byte> workspace(plan.workspace_bytes() - 1);
  args.workspace = workspace;
  EXPECT_THAT(refusal([&] { plan.run(args); }),
              HasSubstr("expected " + std::to_string(plan.workspace_bytes()) +
                        ", see BackwardPlan::workspace_bytes"));
}

TEST(BackwardPlan, MoreWorkersThanPlannedAreRefused) {
  GradientMemory memory(small_case());
  attention_forward(memory.forward.args());
  AttentionBackward args = memory.args();
  const BackwardPlan plan = plan_backward(problem_for(args, 1));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const auto pool = make_thread_pool(2);
  args.workspace = workspace;
  args.executor = pool.get();
  EXPECT_EQ(refusal([&] { plan.run(args); }),
            "attention_backward: executor runs 2 workers; expected at most 1, the num_threads of "
            "the plan's problem");
}

TEST(BackwardPlan, ProductsInBf16OfOtherInputsAreRefusedByName) {
  GradientMemory memory(small_case());
  BackwardProblem problem = problem_for(memory.args(), 1);
  problem.forward.compute_dtype = ComputeDtype::bf16;
  problem.forward.cpu_target = cpu::best_f32_target();
  EXPECT_THAT(refusal([&] { static_cast<void>(plan_backward(problem)); }),
              HasSubstr("compute_dtype is bf16 and this target multiplies in f32"));
  problem.forward.cpu_target = CpuTarget::automatic;
  const std::string message = refusal([&] { static_cast<void>(plan_backward(problem)); });
  EXPECT_THAT(message, HasSubstr("plan_backward: no kernel for this problem on cpu:"));
#if defined(__x86_64__)
  for (const char* target : {"amx_bf16", "avx512_bf16"}) {
    EXPECT_THAT(message, HasSubstr(std::string(target) +
                                   "  inputs are f32; gradients in products of bf16 take bf16"));
  }
#endif
  EXPECT_EQ(explain(problem).kernel, "");
}

TEST(BackwardPlan, ProductsInBf16RunWhereTheProcessorHasThem) {
  GradientCase in_bf16 = small_case();
  in_bf16.forward.dtype = Dtype::bf16;
  GradientMemory memory(in_bf16);
  BackwardProblem problem = problem_for(memory.args(), 1);
  for (const CpuTarget target : {CpuTarget::avx512_bf16, CpuTarget::amx_bf16}) {
    problem.forward.cpu_target = target;
    const Explanation e = explain(problem);
    if (const std::string_view missing = cpu::missing_for(target); !missing.empty()) {
      EXPECT_EQ(e.kernel, "");
      EXPECT_THAT(e.print(), HasSubstr(std::string(missing)));
      continue;
    }
    EXPECT_EQ(e.target, name(target));
    EXPECT_EQ(e.compute_dtype, "bf16");
  }
  problem.forward.cpu_target = CpuTarget::automatic;
  const CpuTarget best = cpu::best_bf16_target();
  EXPECT_EQ(explain(problem).compute_dtype, best == CpuTarget::automatic ? "f32" : "bf16");
}

TEST(BackwardPlan, ABoundServesAllLengthsBelow) {
  GradientCase bounded = small_case();
  bounded.forward.seqlen_q = 7;
  bounded.forward.seqlen_kv = 300;
  GradientMemory memory(bounded);
  attention_forward(memory.forward.args());
  const auto pool = make_thread_pool(2);
  AttentionBackward args = memory.args();
  args.executor = pool.get();
  BackwardProblem problem = problem_for(args, 2);
  const auto expected_plan = plan_backward(problem);
  problem.forward.seqlen_q = up_to(40);
  problem.forward.seqlen_kv = up_to(6000);
  const auto plan = plan_backward(problem);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  args.workspace = workspace;
  const auto expected = bits_of_run(expected_plan, args);
  memory.poison_outputs();
  EXPECT_TRUE(bits_of_run(plan, args) == expected);
}

TEST(BackwardExplain, NamesKernelWorkAndBound) {
  GradientMemory memory(small_case());
  const Explanation e = explain(problem_for(memory.args(), 1));
  EXPECT_EQ(e.kernel, "cpu/attention_backward");
  EXPECT_EQ(e.compute_dtype, "f32");
  EXPECT_THAT(e.problem, HasSubstr("gradients of q k v slopes"));
  ASSERT_TRUE(e.tiles.has_value());
  const double visible =
      static_cast<double>(e.tiles->partial + e.tiles->full) / static_cast<double>(e.tiles->total());
  // Three products of head_dim_qk, two of head_dim_v.
  EXPECT_DOUBLE_EQ(e.flops, 2.0 * 2 * 4 * 19 * 550 * (3 * 24 + 2 * 16) * visible);
  EXPECT_GT(e.workspace_bytes, 0U);
}

TEST(BackwardCall, RemembersItsPlan) {
  GradientMemory memory(small_case());
  attention_forward(memory.forward.args());
  Runtime runtime(2);
  const AttentionBackward args = memory.args();
  const auto& plans = std::get<Runtime::Impl::Cache<BackwardPlan>>(runtime.impl().caches);
  attention_backward(args, runtime);
  EXPECT_EQ(plans.size(), 1U);
  attention_backward(args, runtime);
  EXPECT_EQ(plans.size(), 1U);
  AttentionBackward other = args;
  other.dlse = {};
  attention_backward(other, runtime);
  EXPECT_EQ(plans.size(), 2U);
}

TEST(BackwardCall, WithoutOutIsRefused) {
  GradientMemory memory(small_case());
  AttentionBackward args = memory.args();
  args.forward.out = {};
  EXPECT_EQ(refusal([&] { attention_backward(args); }),
            "attention_backward: forward.out is missing; expected what attention_forward wrote");
}

/// [batch, seqlen, 3, heads, head_dim]: q, k and v, or their gradients, as views of one buffer.
struct Packed {
  static constexpr std::int64_t kBatch = 2, kSeqlen = 21, kHeads = 3, kHeadDim = 8;
  static constexpr std::int64_t kRow = kHeads * kHeadDim;
  std::vector<float> floats = std::vector<float>(kBatch * kSeqlen * 3 * kRow);

  TensorView part(std::int64_t index) {
    return view(floats.data() + index * kRow, {kBatch, kSeqlen, kHeads, kHeadDim},
                {kSeqlen * 3 * kRow, 3 * kRow, kHeadDim, 1});
  }
};

TEST(AttentionBackward, WritesGradientsIntoOnePackedBuffer) {
  Packed qkv;
  for (std::size_t i = 0; i < qkv.floats.size(); ++i)
    qkv.floats[i] = 0.01F * static_cast<float>(i % 97) - 0.4F;
  constexpr std::int64_t kRows = Packed::kBatch * Packed::kSeqlen * Packed::kHeads;
  std::vector<float> out(kRows * Packed::kHeadDim), dout(out.size(), 0.5F), lse(kRows);
  const auto dense = [](std::vector<float>& floats) {
    return view(floats.data(), {Packed::kBatch, Packed::kSeqlen, Packed::kHeads, Packed::kHeadDim});
  };
  dout[3] = -2;
  const AttentionForward forward = {
      .q = qkv.part(0),
      .k = qkv.part(1),
      .v = qkv.part(2),
      .out = dense(out),
      .lse = view(lse.data(), {Packed::kBatch, Packed::kHeads, Packed::kSeqlen}),
      .mask = causal()};
  attention_forward(forward);
  Packed packed;
  attention_backward({.dout = dense(dout),
                      .forward = forward,
                      .dq = packed.part(0),
                      .dk = packed.part(1),
                      .dv = packed.part(2)});
  std::vector<float> dq(out.size()), dk(out.size()), dv(out.size());
  const AttentionBackward apart = {
      .dout = dense(dout), .forward = forward, .dq = dense(dq), .dk = dense(dk), .dv = dense(dv)};
  attention_backward(apart);
  EXPECT_TRUE(bits_of(packed.part(0)) == bits_of(apart.dq));
  EXPECT_TRUE(bits_of(packed.part(1)) == bits_of(apart.dk));
  EXPECT_TRUE(bits_of(packed.part(2)) == bits_of(apart.dv));
  EXPECT_EQ(
      refusal([&] {
        attention_backward(
            {.dout = dense(dout), .forward = forward, .dq = packed.part(0), .dk = packed.part(0)});
      }),
      "attention_backward: dk overlaps dq; expected memory of its own");
}

}  // namespace
}  // namespace fovea::testing
