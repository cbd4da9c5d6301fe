// Gradients of attention over tiles, recomputing probabilities from q, k and lse.
//
//   for each row: delta = dO · O - dlse                      first, and dq = 0; or Σ P dP / Σ P - dlse (sum_delta)
//   for each work item (sequence, kv head, chunk of keys):
//     load K and V of the chunk; dK = dV = 0
//     for each few panels of queries that see the chunk:
//       pack Qᵀ, dOᵀ and their rows; dQᵀ = 0
//       for each kv tile of the chunk, for each panel that sees it:
//         S = K Qᵀ;  S = mask(program(S));  dP = V dOᵀ
//         P = exp(S - lse);  dS = P (dP - delta) program'(S)
//         dV += P dO;  dK += dS Q;  dQᵀ += Kᵀ dS
//       add dQᵀ to the sums of dq
//     write dK, dV
//   dq = its sums, in order of chunks; dsinks; captured gradients
//
// Bound: five products at the f32 multiply-add rate; see docs/kernels/attention_backward_cpu.md.
//
// Bits: a chunk is cut by the sequence's own length alone, its dK and dV are summed over the sequence's rows in order,
// and dq over tiles, then over chunks in order. That order is the same whether chunks run in turn (adding to one sum)
// or side by side (a sum each, merged in order), so threads and batch mates cannot change a bit. No atomics anywhere.
//
// backward/ holds the parts, in the order in which to read them:
//   call.hpp            what all items share
//   schedule.hpp        blocks of rows, chunks of keys
//   row_panel.hpp       a panel of rows
//   tile_scores.hpp     one panel's tile: S, P, dS, through the program
//   row_statistics.hpp  lse and delta, before the tiles
//   summed_delta.hpp    delta of P and dP themselves
//   chunk_walk.hpp      the walk of an item: dK, dV, dQ
//   non_finite.hpp      NaN and infinity
//   dq_sums.hpp         sums of dq, merged in order
//   captured_sums.hpp   gradients of what programs capture
//   results.hpp         dsinks, padding
#include "cpu/attention_backward.hpp"

#include <vector>

#include "cpu/backward/call.hpp"
#include "cpu/backward/captured_sums.hpp"
#include "cpu/backward/chunk_walk.hpp"
#include "cpu/backward/dq_sums.hpp"
#include "cpu/backward/results.hpp"
#include "cpu/backward/row_statistics.hpp"
#include "cpu/backward/schedule.hpp"
#include "cpu/backward/summed_delta.hpp"
#include "cpu/backward/workspace.hpp"
#include "cpu/quantized/attention_quantized_backward.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {
namespace {

/// One call: its stages, each on the executor's workers.
class BackwardRun {
 public:
  BackwardRun(const GradientProblem& problem, const BackwardPlan& plan,
              const AttentionBackward& args, std::byte* workspace, Executor& executor)
      : carver_(workspace),
        memory_(BackwardMemory::carve(carver_, problem, plan.schedule)),
        call_(problem, plan, args, memory_),
        captured_(problem, plan.captured, plan.schedule.num_tasks, &args, carver_),
        blocks_(call_),
        dq_sums_(call_),
        executor_(executor) {
    for (int worker = 0; worker < plan.num_workers; ++worker)
      scratch_.push_back(BackwardScratch::carve(carver_, problem, plan));
  }

  void run() {
    const GradientProblem& problem = call_.problem;
    const std::int64_t captured_blocks = problem.captured.empty() ? 0 : captured_.num_blocks();
    clear_padding_rows(call_);
    for_each(blocks_.count(), [this](int worker, std::int64_t i) { prepare(worker, blocks_[i]); });
    for_each(captured_blocks, [this](int, std::int64_t i) { captured_.clear_block(i); });
    for_each(call_.schedule.num_tasks, [this](int worker, std::int64_t i) { walk(worker, i); });
    if (dq_sums_.is_apart())
      for_each(blocks_.count(), [this](int, std::int64_t i) { dq_sums_.write(blocks_[i]); });
    if (problem.wants_dsinks)
      for_each(call_.f.num_heads_q, [this](int, std::int64_t i) { write_dsink(call_, i); });
    for_each(captured_blocks, [this](int, std::int64_t i) { captured_.finish_block(i); });
  }

 private:
  template <typename Task>
  void for_each(std::int64_t count, const Task& task) {
    run_tasks(executor_, count, task);
  }

  const BackwardScratch& scratch(int worker) const {
    return scratch_[static_cast<std::size_t>(worker)];
  }

  /// Before the tiles.
  void prepare(int worker, const RowRange& rows) const {
    for (std::int64_t i = rows.begin; i < rows.end; ++i)
      dq_sums_.clear_row(rows.sequence, call_.row_at(rows, i));
    compute_row_statistics(rows, call_, scratch(worker));
    if (call_.plan.sums_delta) sum_delta(rows, call_, scratch(worker));
  }

  /// The items of a task, one after the other.
  void walk(int worker, std::int64_t task) {
    if (!call_.problem.captured.empty()) captured_.clear_task(task);
    for_each_item(call_, task, [&](const BackwardItem& item) {
      ChunkWalk(call_, item, task, dq_sums_, captured_, scratch(worker)).run();
    });
  }

  Carver carver_;
  const BackwardMemory memory_;
  const BackwardCall call_;
  CapturedSums captured_;
  const RowBlocks blocks_;
  const DqSums dq_sums_;
  std::vector<BackwardScratch> scratch_;
  Executor& executor_;
};

}  // namespace

void attention_backward(const GradientProblem& problem, const BackwardPlan& plan,
                        const AttentionBackward& args, std::byte* workspace, Executor& executor) {
  if (plan.rounded != nullptr)
    return attention_quantized_backward(problem, plan, args, workspace, executor);
  BackwardRun(problem, plan, args, workspace, executor).run();
}

}  // namespace fovea::cpu
