// Work items share out all rows and tiles of a call: each once, whatever the lengths, heads and threads.
#include "cpu/forward/schedule.hpp"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <vector>

#include "support/case.hpp"

namespace fovea::cpu {
namespace {

using testing::Case;
using testing::CaseMemory;

/// How often a tile of a row is computed, by sequence, kv head, row and tile.
using Visits = std::map<std::array<std::int64_t, 4>, int>;

Visits visits_of(const ForwardSchedule& schedule) {
  Visits visits;
  for (std::int64_t i = 0; i < schedule.num_items(); ++i) {
    const ForwardItem item = schedule.item_at(i);
    for (std::int64_t head = item.kv_head; head < item.kv_head + item.num_heads; ++head) {
      for (std::int64_t row = item.row_begin; row < item.row_end; ++row) {
        for (std::int64_t tile = item.tile_begin; tile < item.tile_end; ++tile)
          ++visits[{item.sequence.index, head, row, tile}];
      }
    }
  }
  return visits;
}

void expect_each_once(const Case& problem, int num_threads) {
  CaseMemory memory(problem);
  const AttentionForward args = memory.args();
  const ForwardProblem f = validate(problem_of(args), "test");
  const ForwardPlan plan = plan_forward(f, num_threads);
  const ForwardCall call(f, plan, args, nullptr);
  std::vector<std::int64_t> first_item(static_cast<std::size_t>(f.num_sequences) + 1);
  for (const bool are_side_by_side : {false, true}) {
    const ForwardSchedule schedule(call, are_side_by_side, first_item.data());
    const Visits visits = visits_of(schedule);
    std::size_t expected = 0;
    for (std::int64_t i = 0; i < f.num_sequences; ++i) {
      const Sequence s = call.sequence(i);
      expected += static_cast<std::size_t>(f.num_heads_kv * f.group * s.seqlen_q *
                                           ceil_div(s.seqlen_kv, plan.spec.tile_kv));
    }
    EXPECT_EQ(visits.size(), expected) << problem.label << ", " << num_threads << " threads";
    for (const auto& [place, count] : visits) EXPECT_EQ(count, 1) << problem.label;
  }
}

TEST(ForwardSchedule, EveryTileOfEveryRowIsComputedOnce) {
  const Case problems[] = {
      // One panel and two splits: 2048 keys are a split, of 48 lanes at most 12 heads of 4 rows share a panel.
      {.label = "decode",
       .batch = 2,
       .seqlen_q = 1,
       .seqlen_kv = 2200,
       .num_heads_q = 12,
       .num_heads_kv = 3},
      {.label = "one panel",
       .seqlen_q = 11,
       .seqlen_kv = 2049,
       .num_heads_q = 2,
       .num_heads_kv = 2},
      // Panels of 48, 16, 12 and 1 lanes: a last one that is not full.
      {.label = "rows",
       .batch = 2,
       .seqlen_q = 331,
       .seqlen_kv = 257,
       .num_heads_q = 6,
       .num_heads_kv = 3},
      {.label = "packed",
       .sequences = {{1, 130}, {0, 7}, {200, 2050}, {5, 0}, {17, 129}},
       .num_heads_q = 4,
       .num_heads_kv = 2},
  };
  for (const Case& problem : problems) {
    for (const int num_threads : {1, 3, 16}) expect_each_once(problem, num_threads);
  }
}

}  // namespace
}  // namespace fovea::cpu
