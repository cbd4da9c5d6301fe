// Tasks share out all keys of a call, and blocks all its rows: each once.
#include "cpu/backward/schedule.hpp"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "support/gradient_case.hpp"

namespace fovea::cpu {
namespace {

using testing::GradientCase;
using testing::GradientMemory;

/// How often a key or row is met, by sequence, kv head and index.
using Visits = std::map<std::array<std::int64_t, 3>, int>;

void expect_each_once(const Visits& visits, std::int64_t expected) {
  EXPECT_EQ(static_cast<std::int64_t>(visits.size()), expected);
  for (const auto& [place, count] : visits) EXPECT_EQ(count, 1);
}

void expect_shared_out(const GradientCase& problem, int num_threads) {
  SCOPED_TRACE(problem.forward.label + ", threads: " + std::to_string(num_threads));
  GradientMemory memory(problem);
  const AttentionBackward args = memory.args();
  const GradientProblem g = validate(problem_of(args), "test");
  const BackwardPlan plan = plan_backward(g, num_threads);
  std::vector<std::int64_t> first_block(static_cast<std::size_t>(g.forward.num_sequences) + 1);
  const BackwardMemory rows_of_call{.first_block = first_block.data()};
  const BackwardCall call(g, plan, args, rows_of_call);
  Visits keys, rows;
  for (std::int64_t task = 0; task < plan.schedule.num_tasks; ++task) {
    for_each_item(call, task, [&](const BackwardItem& item) {
      for (std::int64_t key = item.key_begin; key < item.key_end; ++key)
        ++keys[{item.sequence.index, item.kv_head, key}];
    });
  }
  const RowBlocks blocks(call);
  for (std::int64_t i = 0; i < blocks.count(); ++i) {
    const RowRange block = blocks[i];
    for (std::int64_t row = block.begin; row < block.end; ++row)
      ++rows[{block.sequence.index, block.kv_head, row}];
  }
  std::int64_t num_keys = 0;
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < g.forward.num_sequences; ++i) {
    num_keys += call.sequence(i).seqlen_kv * g.forward.num_heads_kv;
    num_rows += call.sequence(i).seqlen_q * g.forward.num_heads_q;
  }
  expect_each_once(keys, num_keys);
  expect_each_once(rows, num_rows);
}

TEST(BackwardSchedule, EveryKeyAndEveryRowComesOnce) {
  const GradientCase problems[] = {
      // Three chunks: side by side where threads are many, in turn where there is one.
      {.forward = {.label = "chunks",
                   .batch = 2,
                   .seqlen_q = 70,
                   .seqlen_kv = 1290,
                   .num_heads_q = 4,
                   .num_heads_kv = 2}},
      // A row more than a block of four panels of 48.
      {.forward = {.label = "blocks",
                   .seqlen_q = 193,
                   .seqlen_kv = 31,
                   .num_heads_q = 3,
                   .num_heads_kv = 3}},
      {.forward = {.label = "packed",
                   .sequences = {{1, 600}, {0, 7}, {90, 1025}, {5, 0}},
                   .num_heads_q = 4,
                   .num_heads_kv = 2}},
  };
  for (const GradientCase& problem : problems) {
    for (const int num_threads : {1, 8}) expect_shared_out(problem, num_threads);
  }
}

}  // namespace
}  // namespace fovea::cpu
