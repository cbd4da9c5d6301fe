// Plans: exact workspace, bounds, what may change between runs, refusals, explain, runtimes.
#include "plan/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "fovea/backward.hpp"
#include "fovea/mask.hpp"

#include "cpu/attention_forward.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

using ::testing::HasSubstr;

/// Two tiles of 128 keys and uneven work.
Case small_case() {
  return {.batch = 2,
          .seqlen_q = 19,
          .seqlen_kv = 150,
          .num_heads_q = 4,
          .num_heads_kv = 2,
          .head_dim_qk = 24,
          .head_dim_v = 16,
          .mask = causal()};
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

/// Runs with exactly the workspace that the plan names, and returns the bits of out and lse.
std::vector<std::uint64_t> bits_of_run(const Plan& plan, AttentionForward args) {
  std::vector<std::byte> workspace(plan.workspace_bytes(), std::byte{0xFF});
  args.workspace = workspace;
  plan.run(args);
  std::vector<std::uint64_t> bits = bits_of(args.out);
  const std::vector<std::uint64_t> lse = bits_of(args.lse);
  bits.insert(bits.end(), lse.begin(), lse.end());
  return bits;
}

Problem problem_for(const AttentionForward& args, int num_threads) {
  Problem problem = problem_of(args);
  problem.num_threads = num_threads;
  return problem;
}

TEST(PlanWorkspace, IsEnoughAtEveryMisalignment) {
  CaseMemory memory(small_case());
  const auto pool = make_thread_pool(2);
  AttentionForward args = memory.args();
  args.executor = pool.get();
  const Plan plan = fovea::plan(problem_for(args, 2));
  constexpr std::size_t kGuard = 256;
  std::vector<std::byte> buffer(plan.workspace_bytes() + 2 * kGuard + 64);
  for (std::size_t shift = 0; shift < 64; ++shift) {
    std::fill(buffer.begin(), buffer.end(), std::byte{0xA5});
    const std::span<std::byte> all(buffer);
    args.workspace = all.subspan(kGuard + shift, plan.workspace_bytes());
    plan.run(args);
    const auto is_guard = [](std::byte b) { return b == std::byte{0xA5}; };
    EXPECT_TRUE(std::ranges::all_of(all.first(kGuard + shift), is_guard)) << shift;
    EXPECT_TRUE(std::ranges::all_of(all.subspan(kGuard + shift + plan.workspace_bytes()), is_guard))
        << shift;
  }
}

TEST(PlanWorkspace, OneByteLessIsRefusedAtEveryMisalignment) {
  CaseMemory memory(small_case());
  const auto pool = make_thread_pool(1);
  AttentionForward args = memory.args();
  args.executor = pool.get();
  const Plan plan = fovea::plan(problem_for(args, 1));
  std::vector<std::byte> buffer(plan.workspace_bytes() + 64);
  for (std::size_t shift = 0; shift < 64; ++shift) {
    args.workspace = std::span(buffer).subspan(shift, plan.workspace_bytes() - 1);
    EXPECT_EQ(refusal([&] { plan.run(args); }),
              "attention_forward: workspace has " + std::to_string(plan.workspace_bytes() - 1) +
                  " bytes; expected " + std::to_string(plan.workspace_bytes()) +
                  ", see Plan::workspace_bytes");
  }
}

TEST(PlanRun, SeveralThreadsAtOnceGiveTheSameBits) {
  const auto pool = make_thread_pool(2);
  CaseMemory first(small_case());
  AttentionForward args = first.args();
  args.executor = pool.get();
  const Plan plan = fovea::plan(problem_for(args, 2));
  const auto expected = bits_of_run(plan, args);
  EXPECT_EQ(bits_of_run(plan, args), expected);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      CaseMemory mine(small_case());
      AttentionForward call = mine.args();
      call.executor = pool.get();
      for (int run = 0; run < 5; ++run) EXPECT_EQ(bits_of_run(plan, call), expected);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(PlanRun, BoundedPlanEqualsSeparatePlans) {
  const auto pool = make_thread_pool(2);
  Case largest = small_case();
  largest.seqlen_q = 40;
  largest.seqlen_kv = 300;
  CaseMemory reserved(largest);
  Problem problem = problem_for(reserved.args(), 2);
  problem.out = {};
  problem.seqlen_q = up_to(40);
  problem.seqlen_kv = up_to(300);
  const Plan bounded = fovea::plan(problem);
  // Nothing, one row, a tile's edge and the bound itself.
  for (const Lengths& lengths :
       std::vector<Lengths>{{0, 7}, {5, 0}, {1, 1}, {19, 128}, {40, 300}}) {
    Case exact = small_case();
    exact.seqlen_q = lengths.q;
    exact.seqlen_kv = lengths.kv;
    CaseMemory memory(exact);
    AttentionForward args = memory.args();
    args.executor = pool.get();
    const auto expected = bits_of_run(fovea::plan(problem_for(args, 2)), args);
    memory.poison_outputs();
    EXPECT_EQ(bits_of_run(bounded, args), expected) << lengths.q << " x " << lengths.kv;
  }
  largest.seqlen_kv = 301;
  CaseMemory longer(largest);
  EXPECT_EQ(refusal([&] { bits_of_run(bounded, longer.args()); }),
            "attention_forward: k has length 301; expected at most 300, the bound of the plan");
}

TEST(PlanRun, ScalarsAndContentsMayChangeWithoutANewPlan) {
  const auto pool = make_thread_pool(1);
  CaseMemory memory(small_case());
  AttentionForward args = memory.args();
  args.executor = pool.get();
  args.mask = window(4, 0);
  const Plan plan = fovea::plan(problem_for(args, 1));
  const auto narrow = bits_of_run(plan, args);
  args.mask = window(70, 0);
  const auto wide = bits_of_run(plan, args);
  EXPECT_NE(wide, narrow);
  EXPECT_EQ(wide, bits_of_run(fovea::plan(problem_for(args, 1)), args));

  std::vector<std::int32_t> ids_q(2 * 19, 1), ids_kv(2 * 150, 1);
  args.mask = documents(view(ids_q.data(), {2, 19}), view(ids_kv.data(), {2, 150}));
  const Plan packed = fovea::plan(problem_for(args, 1));
  const auto all = bits_of_run(packed, args);
  std::fill(ids_kv.begin(), ids_kv.begin() + 140, 2);  // a whole tile becomes empty
  const auto some = bits_of_run(packed, args);
  EXPECT_NE(some, all);
  EXPECT_EQ(some, bits_of_run(fovea::plan(problem_for(args, 1)), args));
}

TEST(PlanRun, WhatDoesNotFitIsRefusedAndNothingIsWritten) {
  CaseMemory memory(small_case());
  const auto pool = make_thread_pool(1), bigger = make_thread_pool(2);
  AttentionForward good = memory.args();
  good.executor = pool.get();
  const Plan plan = fovea::plan(problem_for(good, 1));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  good.workspace = workspace;
  std::vector<float> spare(4096);
  std::vector<std::int32_t> cu = {0, 19};
  struct Wrong {
    std::function<void(AttentionForward&)> spoil;
    const char* message;
  };
  const Wrong wrongs[] = {
      {[](auto& a) { a.q = {}; }, "q is missing; expected f32 [2, 19, 4, 24]"},
      {[](auto& a) { a.k = a.q; }, "k is f32 [2, 19, 4, 24]; expected f32 [2, 150, 2, 24]"},
      {[](auto& a) { a.q = TensorView(static_cast<const void*>(nullptr), a.q.spec()); },
       "q has no data; expected a pointer"},
      {[](auto& a) { a.out = TensorView(a.out.data(), a.out.spec()); },
       "out is read-only; expected a view of writable memory"},
      {[](auto& a) { a.lse = {}; }, "lse is missing; the plan was made with it"},
      {[&](auto& a) { a.sinks = view(spare.data(), {4}); },
       "sinks is given; the plan was made without it"},
      {[&](auto& a) { a.cu_seqlens_q = view(cu.data(), {2}); },
       "cu_seqlens_q is given; the plan was made without num_sequences"},
      {[](auto& a) { a.mask = {}; },
       "mask is 'true'; expected the plan's 'kv_idx <= q_idx + (seqlen_kv - seqlen_q)'"},
      {[](auto& a) { a.score = softcap(1); }, "expected the plan's 'score'"},
      {[](auto& a) { a.dropout.p = 0.5F; }, "dropout.p is 0.5; the plan was made with 0"},
      {[](auto& a) { a.sm_margin = 8; },
       "sm_margin is 8; the plan was made with 0, expected that or 0"},
      {[](auto& a) { a.softmax_scale = 2.0F; },
       "softmax_scale differs from the plan's; expected the same, or make another plan"},
      {[](auto& a) {
         a.lse = view(static_cast<float*>(a.out.mutable_data()), {2, 4, 19});
       },
       "lse overlaps out; expected memory of its own"},
      {[](auto& a) { a.out = TensorView(const_cast<void*>(a.k.data()), a.out.spec()); },
       "out overlaps k; expected memory of its own"},
      {[&](auto& a) { a.executor = bigger.get(); },
       "executor runs 2 workers; expected at most 1, the num_threads of the plan's problem"},
  };
  memory.poison_outputs();
  const auto out = bits_of(good.out), lse = bits_of(good.lse);
  for (const Wrong& wrong : wrongs) {
    AttentionForward args = good;
    wrong.spoil(args);
    EXPECT_THAT(
        refusal([&] { plan.run(args); }),
        ::testing::AllOf(::testing::StartsWith("attention_forward: "), HasSubstr(wrong.message)));
    EXPECT_EQ(bits_of(good.out), out) << wrong.message;
    EXPECT_EQ(bits_of(good.lse), lse) << wrong.message;
    EXPECT_EQ(memory.damage(), "") << wrong.message;
  }
  EXPECT_EQ(refusal([&] { plan.run(good); }), "(not refused)");
}

TEST(Unsupported, NamesEveryCandidateWithItsReason) {
  const Problem wide{.q = make_spec(Dtype::f32, std::vector<std::int64_t>{1, 1, 1, 577}),
                     .k = make_spec(Dtype::f32, std::vector<std::int64_t>{1, 1, 1, 577}),
                     .v = make_spec(Dtype::f32, std::vector<std::int64_t>{1, 1, 1, 8})};
  const std::string message = refusal([&] { static_cast<void>(plan(wide)); });
  EXPECT_THAT(message, HasSubstr("head_dim_qk 577 is above 576"));
  const Explanation explanation = explain(wide);
  EXPECT_EQ(explanation.kernel, "");
  EXPECT_EQ(explanation.refused.size(), cpu::forward_candidates().size());
  for (const auto& candidate : cpu::forward_candidates())
    EXPECT_THAT(message, HasSubstr(std::string(candidate.name)));
  EXPECT_TRUE(nlohmann::json::accept(explanation.json()));
}

TEST(SmMargin, ChangesNothingOnTheCpu) {
  CaseMemory memory(small_case());
  AttentionForward args = memory.args();
  attention_forward(args);
  const auto out = bits_of(args.out);
  memory.poison_outputs();
  args.sm_margin = 16;
  attention_forward(args);
  EXPECT_EQ(bits_of(args.out), out);
  EXPECT_THAT(explain(problem_of(args)).problem, HasSubstr(", sm_margin 16"));
}

TEST(Devices, TensorsOfOneProblemShareOne) {
  CaseMemory memory(small_case());
  Problem problem = problem_for(memory.args(), 1);
  problem.out.device = Device::cuda(1);
  EXPECT_EQ(refusal([&] { static_cast<void>(plan(problem)); }),
            "plan: out lives on cuda:1 but q on cpu; expected one device");
}

/// Sets FOVEA_CPU_TARGET and restores what was there.
class WithCpuTarget {
 public:
  explicit WithCpuTarget(const char* value) { setenv("FOVEA_CPU_TARGET", value, 1); }
  ~WithCpuTarget() { unsetenv("FOVEA_CPU_TARGET"); }
};

TEST(CpuTargetVariable, ChoosesOrIsRefused) {
  CaseMemory memory(small_case());
  Problem problem = problem_for(memory.args(), 1);
  for (const CpuTarget target : targets_for(Dtype::f32)) {
    const WithCpuTarget set(std::string(name(target)).c_str());
    EXPECT_EQ(explain(problem).target, name(target));
  }
  const WithCpuTarget set("pentium");
  EXPECT_THAT(refusal([&] { static_cast<void>(plan(problem)); }),
              HasSubstr("FOVEA_CPU_TARGET is 'pentium'"));
  problem.cpu_target = targets_for(Dtype::f32).front();  // the problem's word comes first
  EXPECT_EQ(explain(problem).target, name(problem.cpu_target));
}

TEST(Explain, CountsTilesAndSaysWhatThePlanSays) {
  CaseMemory memory(small_case());
  const Plan plan = fovea::plan(problem_for(memory.args(), 1));
  const Explanation e = plan.explain();
  ASSERT_TRUE(e.tiles);
  TileCount dense;
  for (std::int64_t q = 0; q < 19; q += e.tile_q) {
    for (std::int64_t kv = 0; kv < 150; kv += e.tile_kv) {
      std::int64_t visible = 0, all = 0;
      for (std::int64_t i = q; i < std::min<std::int64_t>(19, q + e.tile_q); ++i) {
        for (std::int64_t j = kv; j < std::min<std::int64_t>(150, kv + e.tile_kv); ++j) {
          ++all;
          visible += j <= i + 131;
        }
      }
      (visible == 0 ? dense.empty : visible == all ? dense.full : dense.partial) += 2 * 4;
    }
  }
  EXPECT_TRUE(*e.tiles == dense);
  EXPECT_EQ(e.workspace_bytes, plan.workspace_bytes());
  const auto json = nlohmann::json::parse(e.json());
  EXPECT_EQ(json["kernel"], "cpu/attention_forward");
  EXPECT_EQ(json["mask"], e.mask);
  EXPECT_EQ(json["tiles"]["partial"], dense.partial);
  EXPECT_EQ(json["workspace_bytes"], plan.workspace_bytes());
  EXPECT_THAT(e.print(), HasSubstr("workspace  " + std::to_string(plan.workspace_bytes())));
}

/// A formula whose text is several times as long as what is shown of one.
ScoreMod long_sum() {
  Expr sum = fovea::arguments().score;
  for (int i = 0; i < 1000; ++i) sum = sum + fovea::arguments().score * (0.5 + i);
  return ScoreMod(sum);
}

TEST(Explain, ShowsTheBeginningOfLongTexts) {
  Case problem = small_case();
  problem.score = long_sum();
  CaseMemory memory(problem);
  const AttentionForward args = memory.args();
  EXPECT_EQ(refusal([&] { attention_forward(args); }), "(not refused)");
  const Explanation e = explain(problem_for(args, 1));
  EXPECT_EQ(e.score.size(), 4096U + 4U);
  EXPECT_THAT(e.score, ::testing::StartsWith("score + score * 0.5 + score * 1.5 + "));
  EXPECT_THAT(e.score, ::testing::EndsWith(" ..."));
  EXPECT_EQ(nlohmann::json::parse(e.json())["score"], e.score);
  const Explanation planned = plan(problem_for(args, 1)).explain();
  EXPECT_EQ(planned.print(), e.print());
}

TEST(Explain, ALongProgramIsRefusedByItsBeginning) {
  CaseMemory memory(small_case());
  AttentionForward args = memory.args();
  const Plan plan = fovea::plan(problem_for(args, 1));
  args.score = long_sum();
  EXPECT_THAT(refusal([&] { plan.run(args); }),
              ::testing::MatchesRegex(
                  "attention_forward: score is 'score \\+ score .* \\.\\.\\.'; expected the plan's "
                  "'score'"));
}

TEST(Explain, CountsNoTilesWhereThereAreTooMany) {
  constexpr std::int64_t kHeads = (std::int64_t{1} << 31) - 1;
  const auto spec = [](std::int64_t batch, std::int64_t heads) {
    return make_spec(Dtype::f32, std::vector<std::int64_t>{batch, 1, heads, 8});
  };
  for (const auto& [batch, heads] :
       {std::pair{std::int64_t{1}, kHeads}, std::pair{kHeads, std::int64_t{1}}}) {
    Problem problem{.q = spec(batch, heads), .k = spec(batch, heads), .v = spec(batch, heads)};
    EXPECT_EQ(explain(problem).tiles->total(), kHeads);
    problem.mask = parse_mask_mod("q_head + batch < 7");
    const Explanation e = explain(problem);
    EXPECT_FALSE(e.tiles);
    EXPECT_EQ(e.flops, 2.0 * 16 * static_cast<double>(kHeads));
    EXPECT_FALSE(e.kernel.empty());
  }
}

/// Memory that is gone at the end of its scope: whoever reads it then crashes.
class LentMemory {
 public:
  explicit LentMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;
  ~LentMemory() { munmap(data_, bytes_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t bytes_;
  void* data_;
};

TEST(Explain, OfAPlanLooksAtNoTensorThatThePlanWasMadeWith) {
  constexpr std::int64_t kLength = 4096;
  const TensorSpec rows = make_spec(Dtype::f32, std::vector<std::int64_t>{1, kLength, 1, 64});
  std::optional<Plan> plan;
  std::optional<BackwardPlan> backward;
  Explanation lent;
  {
    const LentMemory segments(kLength * sizeof(std::int32_t));
    const LentMemory slopes(kLength * sizeof(float));
    const Problem problem{.q = rows,
                          .k = rows,
                          .v = rows,
                          .score = alibi(view(slopes.as<float>(), {1})),
                          .mask = documents(view(segments.as<std::int32_t>(), {1, kLength}))};
    plan.emplace(fovea::plan(problem));
    backward.emplace(plan_backward({.forward = problem, .dout = rows, .dq = rows}));
    lent = explain(problem);
  }
  ASSERT_TRUE(lent.tiles);
  EXPECT_EQ(lent.tiles->full, lent.tiles->total());  // one document
  for (const Explanation& e : {plan->explain(), backward->explain()}) {
    EXPECT_FALSE(e.tiles);
    EXPECT_NE(e.kernel, "");
    EXPECT_THAT(e.print(), HasSubstr("tiles      not counted"));
    EXPECT_GE(e.flops, lent.flops);
  }
}

TEST(Runtime, PlansAreRememberedAndRuntimesAreApart) {
  Runtime one(1), two(2);
  EXPECT_EQ(one.executor().concurrency(), 1);
  EXPECT_EQ(two.executor().concurrency(), 2);
  CaseMemory memory(small_case());
  const AttentionForward args = memory.args();
  attention_forward(args, one);
  const auto expected = bits_of(args.out);
  for (Runtime* runtime : {&one, &two, &two}) {
    memory.poison_outputs();
    attention_forward(args, *runtime);
    EXPECT_EQ(bits_of(args.out), expected);
  }
}

TEST(Runtime, RememberedPlanDoesNotAcceptUnreadableCuSeqlens) {
  Runtime runtime(1);
  CaseMemory memory(small_case());
  AttentionForward args = memory.args();
  attention_forward(args, runtime);
  std::vector<std::int32_t> cu(4);
  args.cu_seqlens_q = view(cu.data(), {2, 2});
  EXPECT_NE(refusal([&] { attention_forward(args, runtime); }), "(not refused)");
}

TEST(AttentionForward, WritesBetweenTheRowsOfQ) {
  constexpr std::int64_t kSeqlen = 9, kRow = 2 * 8;
  std::vector<float> both(kSeqlen * 2 * kRow, 0.25F), kv(kSeqlen * kRow, 0.5F), apart(kv.size());
  const auto part = [&](std::int64_t index) {
    return view(both.data() + index * kRow, {1, kSeqlen, 2, 8}, {0, 2 * kRow, 8, 1});
  };
  const auto dense = [](std::vector<float>& floats) {
    return view(floats.data(), {1, kSeqlen, 2, 8});
  };
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] += 0.1F * static_cast<float>(i % 5);
  const AttentionForward args = {.q = part(0), .k = dense(kv), .v = dense(kv), .out = dense(apart)};
  attention_forward(args);
  AttentionForward interleaved = args;
  interleaved.out = part(1);
  attention_forward(interleaved);
  EXPECT_TRUE(bits_of(interleaved.out) == bits_of(args.out));
  interleaved.out = view(both.data() + kRow - 1, {1, kSeqlen - 1, 2, 8}, {0, 2 * kRow, 8, 1});
  interleaved.q = view(both.data(), {1, kSeqlen - 1, 2, 8}, {0, 2 * kRow, 8, 1});
  EXPECT_EQ(refusal([&] { attention_forward(interleaved); }),
            "attention_forward: out overlaps q; expected memory of its own");
}

}  // namespace
}  // namespace fovea::testing
