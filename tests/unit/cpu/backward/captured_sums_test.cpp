// How sums of captured gradients may be shared out: by sequences, heads or keys only where no two of them read one
// element.
#include "cpu/backward/captured_sums.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fovea::cpu {
namespace {

constexpr std::int64_t kBatch = 3, kHeads = 4, kKeys = 6000;  // small tables are never shared out

/// A table that is large enough to be shared out, under "score + table[index]".
CapturedSumsPlan plan_of(const std::vector<std::int64_t>& shape, const std::string& index) {
  const auto spec = [](std::int64_t seqlen, std::int64_t heads) {
    return make_spec(Dtype::f32, std::vector<std::int64_t>{kBatch, seqlen, heads, 8});
  };
  const TensorSpec table = make_spec(Dtype::f32, shape);
  BackwardProblem problem;
  problem.forward.q = problem.dout = spec(7, kHeads);
  problem.forward.k = problem.forward.v = spec(kKeys, 2);
  problem.forward.score = parse_score_mod(
      "score + table[" + index + "]",
      {.tensors = {{"table", TensorView(static_cast<void*>(nullptr), table)}}, .scalars = {}});
  problem.dcaptured = {{"table", table}};
  return plan_captured_sums(validate(problem, "test"), 128, 16, 16);
}

TEST(CapturedSums, AreSharedOutByWhatIndexesOneElementEach) {
  EXPECT_TRUE(plan_of({kHeads, kKeys}, "q_head, kv_idx").by_head);
  EXPECT_TRUE(plan_of({kHeads, kKeys}, "q_head, kv_idx").by_key);
  EXPECT_FALSE(plan_of({kHeads, kKeys}, "q_head, kv_idx").by_sequence);
  EXPECT_TRUE(plan_of({kBatch, kKeys, 2}, "batch, kv_idx, kv_head").by_sequence);
  EXPECT_TRUE(plan_of({kBatch, kKeys, 2}, "batch, kv_idx, kv_head").by_head);
  EXPECT_FALSE(plan_of({kHeads, kKeys}, "q_head, kv_idx + 1").by_key);
}

TEST(CapturedSums, OfATableThatEndsEarlyAreNotSharedOut) {
  // Indices beyond the end all read the last element.
  EXPECT_FALSE(plan_of({kHeads - 1, kKeys}, "q_head, kv_idx").by_head);
  EXPECT_FALSE(plan_of({kHeads, kKeys - 1}, "q_head, kv_idx").by_key);
  EXPECT_FALSE(plan_of({kBatch - 1, kKeys, 4}, "batch, kv_idx, q_head").by_sequence);
  EXPECT_FALSE(plan_of({kBatch, kKeys, 1, 2}, "batch, kv_idx, kv_head, 0").by_head);
  EXPECT_TRUE(plan_of({kHeads + 1, kKeys + 1}, "q_head, kv_idx").by_head);
  EXPECT_TRUE(plan_of({kHeads + 1, kKeys + 1}, "q_head, kv_idx").by_key);
}

}  // namespace
}  // namespace fovea::cpu
