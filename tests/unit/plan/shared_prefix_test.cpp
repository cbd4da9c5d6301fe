// Decode with a shared prefix: what is refused before anything is written, its plans, their workspace and explanation.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

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

CacheCase shared_case() {
  CacheCase problem{.seqlens = {60, 43, 50}, .seqlen_q = 2, .num_new = 2, .layout_seed = 0};
  problem.page_size = 16;
  problem.shared_prefix = 40;
  problem.groups = {0, 2};
  return problem;
}

TEST(SharedPrefixDoor, RefusesBeforeAnythingIsWritten) {
  std::vector<std::int32_t> groups{0, 3, 2, 3};
  std::vector<float> q(3 * 2 * 2 * 16 * 2);
  using Spoil = std::function<void(AttentionDecode&)>;
  const auto with_groups = [&](std::int64_t first, std::int64_t count) {
    return [&groups, first, count](AttentionDecode& a) {
      a.shared_prefix.cu_sequences = view(groups.data() + first, {count});
    };
  };
  const std::pair<Spoil, std::string> faults[] = {
      {[](AttentionDecode& a) { a.shared_prefix.seqlen = -1; },
       "shared_prefix.seqlen is -1; expected 0 to 112, the keys that a sequence has room for"},
      {[](AttentionDecode& a) { a.shared_prefix.seqlen = 113; },
       "shared_prefix.seqlen is 113; expected 0 to 112"},
      {[](AttentionDecode& a) { a.shared_prefix.seqlen = 42; },
       "shared_prefix.seqlen is 42 and sequence 1 has 43 keys and 2 queries; expected at least 44 "
       "keys: queries stand behind the prefix"},
      {with_groups(0, 1),
       "shared_prefix.cu_sequences is i32 [1]; expected i32 or i64 [num_groups + 1], of one group "
       "or more"},
      {with_groups(0, 4), "shared_prefix.cu_sequences[2] is 2"},
      {with_groups(1, 1), "shared_prefix.cu_sequences is i32 [1]"},
      {[&](AttentionDecode& a) {
         static const std::int32_t short_of_all[] = {0, 2};
         a.shared_prefix.cu_sequences = view(short_of_all, {2});
       },
       "shared_prefix.cu_sequences ends at 2; expected 3, the batch: every sequence is in a group"},
      {[&](AttentionDecode& a) {
         a.q = view(q.data(), {3, 2, 2, 16}, {128, 32, 16, 1});
       },
       "expected its stride of sequences to be seqlen_q times that of queries, 64"},
  };
  for (const auto& [spoil, expected] : faults) {
    CacheMemory memory(shared_case());
    AttentionDecode args = memory.args();
    spoil(args);
    const std::vector<std::uint64_t> before = bits_of(memory.k.view());
    const std::string got = refusal([&] { attention_decode(args); });
    EXPECT_NE(got.find(expected), std::string::npos) << got << "\nexpected " << expected;
    EXPECT_TRUE(bits_of(memory.k.view()) == before) << expected;
    EXPECT_TRUE(memory.out.is_unchanged()) << expected;
  }
}

/// Rows of all sequences stand in one call then, more than a sequence's own.
TEST(SharedPrefixDoor, TensorsOfWordsAreThoseOfTheCall) {
  CacheMemory memory(shared_case());
  const std::vector<float> table(3 * 2 * 2 * 60, 0.5F);
  const auto with = [&](std::initializer_list<std::int64_t> shape) {
    AttentionDecode args = memory.args();
    args.score = bias(view(table.data(), shape));
    return refusal([&] { attention_decode(args); });
  };
  EXPECT_EQ(with({2, 60}), "(not refused)");
  EXPECT_EQ(with({3, 2, 2, 60}), "(not refused)");
  EXPECT_NE(with({3, 3, 2, 60}).find("bias is f32 [3, 3, 2, 60]; expected [3, 2, 2, any]"),
            std::string::npos);
}

TEST(SharedPrefixPlan, ServesShorterPrefixesInItsWorkspace) {
  CacheMemory planned(shared_case());
  const DecodePlan plan = plan_decode(planned.args(), 100);
  for (const std::int64_t seqlen : {40, 23}) {
    CacheCase problem = shared_case();
    problem.shared_prefix = seqlen;
    CacheMemory by_plan(problem), by_call(problem);
    AttentionDecode args = by_plan.args();
    PoisonedWorkspace workspace(plan.workspace_bytes());
    args.workspace = workspace.span();
    plan.run(args);
    EXPECT_TRUE(workspace.has_intact_guards());
    attention_decode(by_call.args());
    EXPECT_TRUE(bits_of(by_plan.out.view()) == bits_of(by_call.out.view())) << seqlen;
    EXPECT_TRUE(bits_of(by_plan.lse.view()) == bits_of(by_call.lse.view())) << seqlen;
  }
}

TEST(SharedPrefixPlan, RefusesLongerPrefixesAndOtherProblems) {
  CacheMemory memory(shared_case());
  AttentionDecode args = memory.args();
  const DecodePlan plan = plan_decode(args, 100);
  std::vector<std::byte> workspace(plan.workspace_bytes());
  args.workspace = workspace;
  args.shared_prefix.seqlen = 41;
  EXPECT_EQ(refusal([&] { plan.run(args); }),
            "attention_decode: shared_prefix.seqlen is 41; expected at most 40, that of the plan");
  for (const std::int64_t seqlen : {0, 32}) {  // none, and whole pages
    args.shared_prefix.seqlen = seqlen;
    EXPECT_NE(refusal([&] { plan.run(args); }).find("another problem than the plan's"),
              std::string::npos);
  }
  args.shared_prefix = {.seqlen = 40};  // one group
  EXPECT_NE(refusal([&] { plan.run(args); }).find("in as many groups"), std::string::npos);
}

TEST(SharedPrefixPlan, WorkspaceIsNamedAndUsedToTheByte) {
  CacheMemory memory(shared_case());
  AttentionDecode args = memory.args();
  const std::size_t bytes = decode_workspace_bytes(args, 60);
  PoisonedWorkspace workspace(bytes);
  args.workspace = workspace.span();
  attention_decode(args);
  EXPECT_TRUE(workspace.has_intact_guards());
}

TEST(SharedPrefixPlan, ExplainsBothParts) {
  CacheMemory memory(shared_case());
  const AttentionDecode args = memory.args();
  const Explanation of_call = explain(args, 100);
  EXPECT_EQ(of_call.kernel, "cpu/attention_forward, cpu/attention_forward, cpu/merge_states");
  EXPECT_NE(of_call.problem.find("40 keys shared by all sequences of each of 2 groups"),
            std::string::npos)
      << of_call.problem;
  EXPECT_EQ(of_call.mask, "true; behind the prefix kv_idx <= q_idx + (seqlen_kv - seqlen_q)");
  EXPECT_GT(of_call.workspace_bytes, 0U);
  const Explanation of_plan = plan_decode(args, 100).explain();
  EXPECT_EQ(of_plan.problem, of_call.problem);
  EXPECT_EQ(of_plan.kernel, of_call.kernel);
  EXPECT_GT(of_plan.flops, 0);
}

}  // namespace
}  // namespace fovea::testing
