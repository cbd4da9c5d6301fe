// attention_decode: workspace, what is refused before anything is written, and plans that are found again.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "cuda/driver/driver.hpp"
#include "plan/runtime.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(not refused)";
}

CacheCase small_case() {
  CacheCase problem{.seqlens = {40, 7}, .seqlen_q = 2, .num_new = 2, .layout_seed = 0};
  problem.page_size = 16;
  return problem;
}

TEST(DecodeWorkspace, ServesEveryCacheUpToTheBound) {
  // Exactly the named bytes, at an odd address, for lengths around the bounds of plans and with more workers than
  // splits.
  const auto pool = make_thread_pool(3);
  for (const std::int64_t seqlen : {1, 2048, 2049, 5000}) {
    CacheCase problem{.seqlens = {seqlen}};
    problem.head_dim_qk = problem.head_dim_v = 8;
    problem.page_size = 16;
    CacheMemory memory(problem);
    AttentionDecode args = memory.args();
    args.executor = pool.get();
    const std::size_t bytes = decode_workspace_bytes(args, 5000);
    std::vector<std::byte> workspace(bytes + 1 + 64, std::byte{0xFF});
    args.workspace = std::span(workspace).subspan(1, bytes);
    attention_decode(args);
    for (std::size_t i = bytes + 1; i < workspace.size(); ++i)
      ASSERT_EQ(workspace[i], std::byte{0xFF}) << seqlen;
    const std::vector<std::uint64_t> got = memory.out_bits(0);
    const AttentionForward dense = memory.dense(0);
    attention_forward(dense);
    EXPECT_TRUE(got == bits_of(dense.out)) << seqlen;
  }
}

TEST(DecodeWorkspace, HoldsTurnedQueries) {
  CacheMemory memory(small_case());
  AttentionDecode args = memory.args();
  const std::size_t plain = decode_workspace_bytes(args, 40);
  args.rotary = Rotary{};
  EXPECT_EQ(decode_workspace_bytes(args, 40) - plain, 2U * 2U * 2U * 16U * sizeof(float));
}

TEST(DecodeWorkspace, IsNamedForLengthsThatExist) {
  CacheMemory memory(small_case());
  const AttentionDecode args = memory.args();
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  EXPECT_GT(decode_workspace_bytes(args, kMost), 0U);
  for (const std::int64_t length : {std::int64_t{-1}, kMost + 1, (std::int64_t{1} << 62) + 1}) {
    EXPECT_EQ(refusal([&] { static_cast<void>(decode_workspace_bytes(args, length)); }),
              "decode_workspace_bytes: max_seqlen_kv is " + std::to_string(length) +
                  "; expected 0 to 2147483647");
  }
}

TEST(DecodeWorkspace, ShortWorkspaceIsRefused) {
  CacheMemory memory(small_case());
  AttentionDecode args = memory.args();
  const std::size_t bytes = decode_workspace_bytes(args, 40);
  std::vector<std::byte> workspace(bytes - 1);
  args.workspace = workspace;
  EXPECT_EQ(refusal([&] { attention_decode(args); }),
            "attention_decode: workspace has " + std::to_string(bytes - 1) + " bytes; expected " +
                std::to_string(bytes) + ", see decode_workspace_bytes");
}

TEST(DecodeDoor, RefusesBeforeAnythingIsWritten) {
  const std::vector<std::int32_t> positions(8);
  const std::vector<float> table(2000);
  const Rotary rotary{.cos = view(table.data(), {100, 8}), .sin = view(table.data(), {100, 8})};
  using Spoil = std::function<void(CacheMemory&, AttentionDecode&)>;
  const std::pair<Spoil, std::string> faults[] = {
      {[](CacheMemory&, AttentionDecode& a) { a.out = {}; },
       "out is missing; expected a view of writable memory shaped like q with head_dim_v"},
      {[](CacheMemory& m, AttentionDecode& a) { a.q = entry_of(m.lse.view(), 0); },
       "q is f32 [1, 2, 2]; expected rank 4: [batch, seqlen_q, num_heads_q, head_dim_qk]"},
      {[](CacheMemory& m, AttentionDecode& a) { a.q = entry_of(m.q.view(), 0); },
       "cache.page_table is i32 [2, 6]; expected i32 or i64 [1, max_pages]"},
      {[](CacheMemory& m, AttentionDecode& a) { a.q = m.out.view(); },
       "k has head_dim 16 but q has 24; expected equal head_dim_qk (v alone may differ)"},
      {[](CacheMemory& m, AttentionDecode& a) { a.out = m.q.mutable_view(); },
       "out is f32 [2, 2, 2, 16]; expected f32 [2, 2, 2, 24]"},
      {[](CacheMemory& m, AttentionDecode& a) { a.lse = m.out.mutable_view(); },
       "lse is f32 [2, 2, 2, 24]; expected f32 [2, 2, 2]"},
      {[](CacheMemory& m, AttentionDecode& a) {
         a.append.k = a.cache.k;
         (void)m;
       },
       "append.k is f32 [6, 16, 1, 16]; expected f32 [2, 16, 1, 16]"},
      {[](CacheMemory& m, AttentionDecode& a) {
         a.cache.k = TensorView(m.new_k.mutable_view().mutable_data(), a.cache.k.spec());
       },
       // It is longer than append.k, so what else it meets depends on where memory lies.
       "expected memory of its own"},
      {[&](CacheMemory&, AttentionDecode& a) {
         a.append = {};
         a.rotary = rotary;
         a.rotary->positions = view(positions.data(), {2, 4});
       },
       "rotary.positions is i32 [2, 4]; expected i32 or i64 [2, 2], one for every query"},
      {[&](CacheMemory&, AttentionDecode& a) {
         a.append = {};
         a.rotary = rotary;
         a.rotary->cos = a.rotary->sin = view(table.data(), {37, 8});
       },
       "rotary.cos has 37 rows; expected at least 38, since sequence 0 has a new token at position "
       "37"},
  };
  for (const auto& [spoil, expected] : faults) {
    CacheMemory memory(small_case());
    AttentionDecode args = memory.args();
    spoil(memory, args);
    const std::vector<std::uint64_t> before = bits_of(memory.k.view());
    const std::string got = refusal([&] { attention_decode(args); });
    EXPECT_NE(got.find(expected), std::string::npos) << got << "\nexpected " << expected;
    EXPECT_TRUE(bits_of(memory.k.view()) == before) << expected;
    EXPECT_TRUE(memory.out.is_unchanged()) << expected;
  }
}

/// CPUs have no kernel for them.
TEST(DecodeDoor, RecipesThatNothingRunsAreRefusedByName) {
  CacheMemory memory(small_case());
  AttentionDecode args = memory.args();
  args.quant = parse_quantization("fast");
  const auto message_of = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const Unsupported& error) {
      return error.what();
    }
    return "";
  };
  const std::string got = message_of([&] { attention_decode(args); });
  EXPECT_NE(got.find("keys lie in a cache; expected tensors"), std::string::npos) << got;
  EXPECT_TRUE(memory.out.is_unchanged());
  args.shared_prefix.seqlen = 1;
  EXPECT_EQ(refusal([&] { attention_decode(args); }),
            "attention_decode: quant is fast beside a shared prefix; expected none: means and "
            "references would be those of parts of the keys");
  args.shared_prefix = {};
  args.quant = parse_quantization("fp8_static");
  EXPECT_EQ(refusal([&] { attention_decode(args); }),
            "attention_decode: quant is fp8_static, whose scales the call gives; expected a recipe "
            "of measured scales over a cache");
}

std::size_t num_plans(Runtime& runtime) {
  return std::get<Runtime::Impl::Cache<Plan>>(runtime.impl().caches).size();
}

TEST(DecodePlans, AGrowingCacheFindsItsPlanAgain) {
  Runtime runtime(1);
  CacheCase problem{.seqlens = {3000}};
  CacheMemory memory(problem);
  for (const std::int64_t length : {2500, 2999, 3000}) {
    memory.seqlens.set(0, static_cast<double>(length));
    attention_decode(memory.args(), runtime);
  }
  EXPECT_EQ(num_plans(runtime), 1U);
  memory.seqlens.set(0, 100);
  attention_decode(memory.args(), runtime);
  EXPECT_EQ(num_plans(runtime), 2U);
}

TEST(DecodeDoor, CachesOfAGpuAreRefusedByNameWhereThereIsNone) {
  const auto& driver = cuda::driver::process_driver();
  if (driver.is_present()) GTEST_SKIP() << "there is a driver";
  CacheMemory memory(small_case());
  AttentionDecode args = memory.args();
  for (TensorView* view : std::initializer_list<TensorView*>{
           &args.q, &args.out, &args.lse, &args.append.k, &args.append.v, &args.cache.k,
           &args.cache.v, &args.cache.page_table, &args.cache.seqlens}) {
    TensorSpec spec = view->spec();
    spec.device = Device::cuda(0);
    *view = view->is_mutable() ? TensorView(view->mutable_data(), spec)
                               : TensorView(view->data(), spec);
  }
  const std::string decode = refusal([&] { attention_decode(args); });
  EXPECT_NE(decode.find("cuda/sm80/attention_forward  " + driver.why_absent()), std::string::npos)
      << decode;
  EXPECT_EQ(refusal([&] { append_to_cache({.cache = args.cache, .append = args.append}); }),
            "append_to_cache: cuda:0: " + driver.why_absent());
}

TEST(DecodePlans, EmptyBatchesAndQueriesAreLegal) {
  CacheMemory memory(small_case());
  AttentionDecode args = memory.args();
  for (TensorView* view : std::initializer_list<TensorView*>{
           &args.q, &args.out, &args.lse, &args.append.k, &args.append.v, &args.cache.page_table,
           &args.cache.seqlens}) {
    TensorSpec spec = view->spec();
    spec.shape[0] = 0;
    *view = view->is_mutable() ? TensorView(view->mutable_data(), spec)
                               : TensorView(view->data(), spec);
  }
  EXPECT_EQ(refusal([&] { attention_decode(args); }), "(not refused)");
}

// ---- plans ----

TEST(DecodePlan, RunsEveryLengthUpToItsOwnWithTheBitsOfACall) {
  CacheMemory planned(small_case());
  const DecodePlan plan = plan_decode(planned.args(), 40);
  for (const std::vector<std::int64_t>& seqlens :
       {std::vector<std::int64_t>{38, 7}, {2, 3}, {40, 40}}) {
    CacheCase problem = small_case();
    problem.seqlens = seqlens;
    CacheMemory direct(problem), run(problem);
    attention_decode(direct.args());
    AttentionDecode args = run.args();
    std::vector<std::byte> workspace(plan.workspace_bytes());
    args.workspace = workspace;
    plan.run(args);
    EXPECT_EQ(bits_of(run.out.view()), bits_of(direct.out.view()));
    EXPECT_EQ(bits_of(run.k.view()), bits_of(direct.k.view()));
  }
}

/// Plans of packed queries serve any lengths of as many rows, up to max_seqlen_q each.
TEST(DecodePlan, OfPackedQueriesRunsAnyLengthsOfAsManyRows) {
  const auto problem_of = [](const std::vector<std::int64_t>& lengths) {
    CacheCase problem{.seqlens = {40, 2500, 33}, .packed_q = lengths, .layout_seed = 0};
    problem.packed_new = lengths;
    problem.page_size = 16;
    return problem;
  };
  CacheMemory planned(problem_of({8, 1, 1}));
  AttentionDecode shapes = planned.args();
  shapes.max_seqlen_q = 8;
  const DecodePlan plan = plan_decode(shapes, 2500);
  EXPECT_NE(plan.explain().problem.find("packed sequences 3, seqlen_q <=8, seqlen_kv <=2500"),
            std::string::npos)
      << plan.explain().problem;
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{8, 1, 1}, {0, 2, 8}, {4, 3, 3}, {1, 8, 1}}) {
    CacheMemory direct(problem_of(lengths)), run(problem_of(lengths));
    attention_decode(direct.args());
    AttentionDecode args = run.args();
    args.max_seqlen_q = 8;
    std::vector<std::byte> workspace(plan.workspace_bytes());
    args.workspace = workspace;
    plan.run(args);
    EXPECT_EQ(run.damage() + run.damage_of_nobody(), "");
    EXPECT_EQ(bits_of(run.out.view()), bits_of(direct.out.view()));
    EXPECT_EQ(bits_of(run.lse.view()), bits_of(direct.lse.view()));
    EXPECT_EQ(bits_of(run.k.view()), bits_of(direct.k.view()));
  }
  CacheMemory longer(problem_of({9, 1, 0}));
  AttentionDecode args = longer.args();
  args.max_seqlen_q = 8;
  EXPECT_EQ(refusal([&] { plan.run(args); }),
            "attention_decode: cu_seqlens_q gives sequence 0 a length of 9; expected at most 8, "
            "max_seqlen_q");
  args.max_seqlen_q = 9;
  EXPECT_NE(refusal([&] { plan.run(args); }).find("another problem than the plan's"),
            std::string::npos);
  EXPECT_TRUE(longer.out.is_unchanged());
}

TEST(DecodePlan, ExplainsItselfWithItsExactWorkspace) {
  CacheMemory memory(small_case());
  const DecodePlan plan = plan_decode(memory.args(), 40);
  const Explanation explanation = plan.explain();
  EXPECT_EQ(explanation.kernel, "cpu/attention_forward");
  EXPECT_EQ(explanation.workspace_bytes, plan.workspace_bytes());
  EXPECT_EQ(explain(memory.args(), 40).kernel, explanation.kernel);
  AttentionDecode args = memory.args();
  std::vector<std::byte> workspace(plan.workspace_bytes() - 1);
  args.workspace = workspace;
  EXPECT_EQ(refusal([&] { plan.run(args); }),
            "attention_decode: workspace has " + std::to_string(workspace.size()) +
                " bytes; expected " + std::to_string(plan.workspace_bytes()) +
                ", see DecodePlan::workspace_bytes");
}

TEST(DecodePlan, RefusesLongerSequencesAndOtherProblems) {
  CacheMemory memory(small_case());
  const DecodePlan plan = plan_decode(memory.args(), 20);
  const std::vector<std::uint64_t> before = bits_of(memory.k.view());
  EXPECT_EQ(
      refusal([&] { plan.run(memory.args()); }),
      "attention_decode: a sequence has 40 keys; expected at most 20, the max_seqlen_kv of the "
      "plan");
  const DecodePlan longer = plan_decode(memory.args(), 40);
  AttentionDecode other = memory.args();
  other.mask = {};
  EXPECT_NE(refusal([&] { longer.run(other); }).find("another problem than the plan's"),
            std::string::npos);
  AttentionDecode shorter = memory.args();
  const auto pool = make_thread_pool(64);
  shorter.executor = pool.get();
  EXPECT_NE(refusal([&] { longer.run(shorter); }).find("executor runs 64 workers"),
            std::string::npos);
  EXPECT_EQ(bits_of(memory.k.view()), before);
  EXPECT_TRUE(memory.out.is_unchanged());
}

TEST(DecodePlan, NeedsNoData) {
  CacheMemory memory(small_case());
  AttentionDecode shapes = memory.args();
  for (TensorView* view : std::initializer_list<TensorView*>{
           &shapes.q, &shapes.cache.k, &shapes.cache.v, &shapes.cache.seqlens,
           &shapes.cache.page_table, &shapes.append.k, &shapes.append.v, &shapes.out})
    *view = TensorView(static_cast<void*>(nullptr), view->spec());
  EXPECT_GT(plan_decode(shapes, 40).workspace_bytes(), 0U);
}

TEST(AppendPlan, WritesWhatACallWritesAndNothingForOtherCaches) {
  CacheMemory direct(small_case()), run(small_case());
  const auto tokens = [](CacheMemory& memory) {
    const AttentionDecode args = memory.args();
    return AppendToCache{.cache = args.cache, .append = args.append};
  };
  const AppendPlan plan = plan_append(tokens(direct));
  append_to_cache(tokens(direct));
  plan.run(tokens(run));
  EXPECT_EQ(bits_of(run.k.view()), bits_of(direct.k.view()));
  EXPECT_EQ(bits_of(run.v.view()), bits_of(direct.v.view()));
  EXPECT_EQ(plan.workspace_bytes(), 0U);
  EXPECT_EQ(plan.explain().kernel, "cpu/append_to_cache");
  AppendToCache other = tokens(run);
  std::swap(other.cache.k, other.cache.v);
  EXPECT_EQ(
      refusal([&] { plan.run(other); }),
      "append_to_cache: cache.k or cache.v has another shape, dtype, stride or device than the "
      "plan's");
}

}  // namespace
}  // namespace fovea::testing
