// Online-softmax attention over tiles, for one panel of queries at a time.
//
//   for each work item (sequence, kv head, block of rows; of one KV split where rows are few):
//     for each kv tile that some row can see:      from the block map, left to right
//       load K and V tile                          once per item and tile, shared by the panels
//       for each panel that sees the tile:         the first time: pack Qᵀ
//         S = K Qᵀ;  S = program(S);  S = mask(S)  mask on partial tiles only
//         P, max, sum = softmax(S);  O = O * rescale + Vᵀ P
//       for each panel that sees no more:  O / sum -> out, lse
//
// What is read or written next (rows of K and V, of queries of panels to come, of out) is fetched meanwhile.
//
// A row's arithmetic depends on its own queries, the keys of its sequence and tile_kv alone: lanes never mix, splits
// are cut by the sequence's own length, and merged in order. So batch mates, threads and scheduling cannot change a
// bit.
//
// forward/ holds the parts, in the order in which to read them:
//   call.hpp            what all items share
//   schedule.hpp        work items and splits
//   row_panel.hpp       the rows of a panel, what they see, their sums
//   tile_walk.hpp       the walk of an item over its tiles
//   score_programs.hpp  scale, program and mask between the products
//   non_finite.hpp      values that are not finite: the common path pays nothing for them
//   split_states.hpp    states of splits, merged in order
//   results.hpp         out, lse, row_max
//   few_rows.hpp        decode: sequences of few rows, another walk
#include "cpu/attention_forward.hpp"

#include <functional>
#include <utility>
#include <vector>

#include "cpu/forward/call.hpp"
#include "cpu/forward/few_rows.hpp"
#include "cpu/forward/non_finite.hpp"
#include "cpu/forward/results.hpp"
#include "cpu/forward/row_panel.hpp"
#include "cpu/forward/schedule.hpp"
#include "cpu/forward/split_states.hpp"
#include "cpu/forward/tile_walk.hpp"
#include "cpu/forward/workspace.hpp"
#include "cpu/quantized/attention_quantized.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {
namespace {

/// One call: its items, on the executor's workers.
class ForwardRun {
 public:
  ForwardRun(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
             std::byte* workspace, Executor& executor, const GrownCache* cache)
      : call_(problem, plan, args, cache),
        carver_(workspace),
        memory_(ForwardMemory::carve(carver_, plan.spec, problem, plan.program_bytes,
                                     plan.num_workers)),
        schedule_(call_, memory_.partials != nullptr, memory_.first_item),
        splits_(call_, schedule_, memory_.partials),
        results_(call_),
        executor_(executor) {}

  void run() const {
    results_.clear_padding_rows();
    run_tasks(executor_, schedule_.num_items(), [this](int worker, std::int64_t index) {
      compute_item(schedule_.item_at(index), memory_.workers[static_cast<std::size_t>(worker)]);
    });
    if (!schedule_.are_splits_side_by_side()) return;
    const std::int64_t num_heads = call_.problem.num_heads_kv;
    run_tasks(executor_, call_.problem.num_sequences * num_heads,
              [&](int /*worker*/, std::int64_t index) {
                splits_.merge(index / num_heads, index % num_heads, results_);
              });
  }

 private:
  void compute_item(const ForwardItem& item, const ForwardScratch& scratch) const {
    const std::int64_t splits = schedule_.num_splits(item.sequence);
    if (splits == 1) {
      compute(item, scratch, [this](const ForwardItem& rows, std::int64_t lane, float* state) {
        results_.finish_row(rows, lane, state);
      });
    } else if (schedule_.are_splits_side_by_side()) {
      compute(item, scratch, [this](const ForwardItem& rows, std::int64_t lane, float* state) {
        splits_.keep(rows, lane, state);
      });
    } else {
      compute_in_turn(item, splits, scratch);
    }
  }

  void compute_in_turn(const ForwardItem& item, std::int64_t splits,
                       const ForwardScratch& scratch) const {
    for (std::int64_t split = 0; split < splits; ++split) {
      ForwardItem part = item;
      schedule_.limit_to_split(part, split);
      const auto add = [&](const ForwardItem& rows, std::int64_t lane, float* state) {
        splits_.add(item, split, rows, lane, state, scratch);
      };
      compute(part, scratch, std::cref(add));
    }
    splits_.finish(item, scratch, results_);
  }

  void compute(const ForwardItem& item, const ForwardScratch& scratch,
               const EmitState& emit) const {
    if (schedule_.is_few(item.sequence)) {
      walk_few_rows(call_, item, scratch, emit);
    } else {
      compute_panels(item, scratch, emit);
    }
  }

  void compute_panels(const ForwardItem& item, const ForwardScratch& scratch,
                      const EmitState& emit) const {
    std::vector<std::pair<ForwardItem, LaneSet>> redo;
    const auto done = [&](const RowPanel& panel) {
      const LaneSet broken = non_finite_rows(panel, call_);
      emit_states(panel, ~broken, call_, scratch, emit);
      if (broken != 0) redo.emplace_back(panel.rows, broken);
    };
    TileWalk(call_, item, scratch).run(std::cref(done));
    for (const auto& [rows, broken] : redo) compute_carefully(rows, broken, scratch, emit);
  }

  /// Infinities in parts of operands become NaN, where fp32 numbers need not: such rows go the plain way in the end.
  void compute_carefully(const ForwardItem& rows, LaneSet wanted, const ForwardScratch& scratch,
                         const EmitState& emit) const {
    TileWalk walk(call_, rows, scratch);
    const RowPanel& panel = walk.run_carefully(call_.kernels);
    const LaneSet broken = call_.spec.is_split ? wanted & non_finite_sums(panel) : 0;
    emit_states(panel, wanted & ~broken, call_, scratch, emit);
    if (broken == 0) return;
    TileWalk plain_walk(call_, rows, scratch);
    emit_states(plain_walk.run_carefully(call_.plain_kernels), broken, call_, scratch, emit);
  }

  const ForwardCall call_;
  Carver carver_;
  const ForwardMemory memory_;
  const ForwardSchedule schedule_;
  const SplitStates splits_;
  const ForwardResults results_;
  Executor& executor_;
};

}  // namespace

void attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, std::byte* workspace, Executor& executor,
                       const GrownCache* cache) {
  if (!problem.problem.quant.is_none())
    return attention_quantized(problem, plan, args, workspace, executor);
  ForwardRun(problem, plan, args, workspace, executor, cache).run();
}

}  // namespace fovea::cpu
