#include "kernels/backward/backward_steps.hpp"

#include <algorithm>

#include "common/backward_sinks.cuh"
#include "common/exact_sum.cuh"
#include "common/range_table.cuh"

namespace fovea::testing {

void register_tensors(const AttentionBackward& args, Emulation& emulation) {
  for (const TensorBytes& tensor : tensors_of_gradients(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
}

void build_tables(const cuda::BackwardPlan& plan, cuda::BackwardLaunch& call,
                  Emulation& emulation) {
  cuda::Captures& captures = call.params.forward.captures;
  for (cuda::CapturedTensorParam& tensor : captures.tensors) tensor.ranges = nullptr;
  if (plan.range_tables.is_empty()) return;
  const std::size_t bytes = plan.workspace_bytes - plan.memory.tables_at;
  const auto tables = emulation.device.buffer<std::byte>("range tables", bytes);
  call.range_tables = plan.range_tables.place(captures, {tables, bytes});
  const cuda::RangeTableLaunch& launch = call.range_tables;
  emulation.launch({.x = launch.num_groups, .y = launch.num_tables}, 32 * cuda::kRunsPerGroup,
                   cuda::kRunsPerGroup * sizeof(cuda::RangeEntry),
                   [&] { cuda::build_range_tables(launch.params); });
}

void run_sinks(const cuda::BackwardPlan& plan, const cuda::BackwardLaunch& call,
               Emulation& emulation) {
  emulation.launch({.x = call.num_sink_ctas}, cuda::kSinkThreads,
                   cuda::kSinkThreads * sizeof(double), [&] {
                     plan.delta.is_varlen ? cuda::backward_sinks<true>(call.params)
                                          : cuda::backward_sinks<false>(call.params);
                   });
}

void run_captured(const cuda::EmulatedCaptured& kernels, const cuda::BackwardLaunch& call,
                  Emulation& emulation) {
  cuda::CapturedLaunch captured = call.captured;
  captured.params.call.forward.captures = call.params.forward.captures;
  const auto run = [&](std::uint32_t num_ctas, const cuda::CtaShape& cta, const auto& kernel) {
    if (num_ctas > 0)
      emulation.launch({.x = num_ctas}, cta.num_threads, cta.shared_bytes,
                       [&] { kernel(captured.params); });
  };
  const auto run_sums = [&](const auto& kernel) {
    emulation.launch({.x = captured.num_element_ctas}, cuda::kExactSumThreads, 0,
                     [&] { kernel(captured.sums); });
  };
  run(captured.num_delta_ctas, captured.walk, kernels.deltas);
  if (captured.num_element_ctas > 0) run_sums(cuda::clear_sums);
  run(captured.num_sum_ctas, captured.walk, kernels.sums);
  if (captured.num_element_ctas > 0) run_sums(cuda::write_sums);
  run(captured.num_dense_ctas, captured.dense, kernels.tiles);
}

void run_redo(const cuda::BackwardStep& step, const cuda::RedoLaunch& redo,
              void (*kernel)(const cuda::BackwardParams&), Emulation& emulation) {
  emulation.launch({.x = redo.num_ctas}, static_cast<std::uint32_t>(step.spec->num_warps) * 32,
                   step.shared_bytes, [&] { kernel(redo.params); });
}

namespace {

/// Finite, unlike the rest of the workspace: a row whose sum began with NaN would be computed again, and be right.
void fill_sums(const cuda::Sm90BackwardLaunch& call, std::int64_t head_dim) {
  constexpr float kGarbage = 1000;
  const cuda::Sm90BackwardRows& rows = call.params.rows;
  for (float* const sums : {rows.dq_sums, rows.dq_round_sums}) {
    if (sums != nullptr) std::fill_n(sums, call.prepare.num_rows * head_dim, kGarbage);
  }
}

}  // namespace

void run_key_walk(const GradientProblem& problem, const cuda::BackwardPlan& plan,
                  const AttentionBackward& args, const cuda::EmulatedHopperBackward& kernels,
                  int ctas_at_once, Emulation& emulation) {
  const auto call = prepared<cuda::Sm90Backward>(problem, plan, args, kernels, emulation);
  fill_sums(call, plan.steps[0].spec->head_dim_qk);
  constexpr std::uint32_t kRowThreads = 32 * cuda::kSm90RowWarps;
  emulation.is_dependent = true;
  emulation.launch({.x = call.num_prepare_ctas}, kRowThreads, 0,
                   [&] { kernels.prepare(call.prepare); });
  emulation.ctas_at_once = ctas_at_once;
  emulation.launch({.x = call.num_ctas},
                   static_cast<std::uint32_t>(plan.steps[0].spec->num_warps) * 32,
                   plan.steps[0].shared_bytes, [&] { kernels.main(call.params); });
  emulation.ctas_at_once = 1;
  if (const auto finish =
          std::ranges::find(plan.steps, cuda::KernelRole::convert, &cuda::BackwardStep::role);
      finish != plan.steps.end())
    emulation.launch({.x = call.num_finish_ctas}, kRowThreads, finish->shared_bytes,
                     [&] { kernels.finish(call.params); });
  for (const cuda::BackwardStep& step : plan.steps) {
    if (!step.is_redo()) continue;
    const bool owns_keys = step.role == cuda::KernelRole::redo_keys;
    run_redo(step, owns_keys ? call.redo_keys : call.redo_queries,
             owns_keys ? kernels.redo_keys : kernels.redo_queries, emulation);
  }
  if (call.num_sum_ctas > 0)
    emulation.launch({.x = call.num_sum_ctas}, kRowThreads, cuda::kSumPairsBytes,
                     [&] { kernels.sum_pairs(call.sum_pairs); });
  emulation.is_dependent = false;
  run_captured(kernels.captured, call.common, emulation);
  run_sinks(plan, call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

}  // namespace fovea::testing
