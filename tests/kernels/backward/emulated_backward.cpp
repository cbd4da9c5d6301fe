#include "kernels/backward/emulated_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "common/backward_sinks.cuh"
#include "common/exact_sum.cuh"
#include "common/range_table.cuh"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/sm80_one_walk.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/backward/sm90_wide.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "problem/backward.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {
namespace {

const cuda::EmulatedBackward& backward_named(std::string_view name) {
  for (const auto& part :
       {cuda::half_of_backwards(), cuda::other_half_of_backwards(), cuda::captured_backwards()}) {
    const auto found = std::ranges::find(part, name, &cuda::EmulatedBackward::name);
    if (found != part.end()) return *found;
  }
  throw std::out_of_range(std::string(name));
}

void register_tensors(const AttentionBackward& args, Emulation& emulation) {
  for (const TensorBytes& tensor : tensors_of_gradients(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
}

/// In memory of their own, so that no access to them strays into the rest of the workspace; and built.
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

/// The launch of a kernel around which others run, over a workspace of garbage; what is known of rows has been found.
template <class Kernel, class Kernels>
auto prepared(const GradientProblem& problem, const cuda::BackwardPlan& plan,
              const AttentionBackward& args, const Kernels& kernels, Emulation& emulation) {
  register_tensors(args, emulation);
  constexpr unsigned char kGarbage = 0xFF;  // NaN
  auto* const workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>(plan.memory.tables_at, kGarbage));
  const auto encode = [](const cuda::driver::TensorMapSpec& spec, const void* address) {
    return cuda::emulator::encode_tensor_map<cuda::TensorMapParam>(spec, address);
  };
  auto call = [&] {
    if constexpr (requires { Kernel::prepare(problem, plan, args, workspace, encode); })
      return Kernel::prepare(problem, plan, args, workspace, encode);
    else
      return Kernel::prepare(problem, plan, args, workspace);
  }();
  build_tables(plan, call.common, emulation);
  call.params.common.forward.captures = call.common.params.forward.captures;
  call.prepare_redo(plan);
  emulation.launch({.x = call.common.num_delta_ctas}, cuda::kDeltaThreads, 0,
                   [&] { kernels.delta(call.common.params); });
  return call;
}

/// Finite, unlike the rest of the workspace: a row whose sum began with NaN would be computed again, and be right.
void fill_sums(const cuda::Sm90BackwardLaunch& call, std::int64_t head_dim) {
  constexpr float kGarbage = 1000;
  const cuda::Sm90BackwardRows& rows = call.params.rows;
  for (float* const sums : {rows.dq_sums, rows.dq_round_sums}) {
    if (sums != nullptr) std::fill_n(sums, call.prepare.num_rows * head_dim, kGarbage);
  }
}

}  // namespace

void run_backward(const std::string& label, const AttentionBackward& args, Emulation& emulation) {
  const GradientProblem problem = validate(problem_of(args), "test");
  const cuda::BackwardPlan plan = plan_of_owners(problem);
  const cuda::EmulatedBackward& kernels = backward_named(label);
  register_tensors(args, emulation);
  constexpr unsigned char kGarbage = 0xFF;  // NaN
  auto* const workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>(plan.memory.tables_at, kGarbage));
  cuda::BackwardLaunch call = cuda::backward_launch(problem, plan, args, workspace);
  build_tables(plan, call, emulation);
  emulation.launch({.x = call.num_delta_ctas}, cuda::kDeltaThreads, 0,
                   [&] { kernels.delta(call.params); });
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const cuda::BackwardStep& step = plan.steps[i];
    emulation.launch({.x = call.num_ctas[i]}, static_cast<std::uint32_t>(step.spec->num_warps) * 32,
                     step.shared_bytes, [&] { kernels.steps[i](call.params); });
  }
  run_captured(kernels.captured, call, emulation);
  run_sinks(plan, call, emulation);
  emulation.expect_launched(call.launches(plan));
}

void run_hopper_backward(const std::string& label, const AttentionBackward& args, int ctas_at_once,
                         Emulation& emulation) {
  const GradientProblem problem = validate(problem_of(args), "test");
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.l2_bytes = 1 << 18;  // heads come in several sections
  device.num_sms = 1;         // a CTA computes several tiles again
  const cuda::BackwardPlan plan =
      cuda::choose_backward_by(cuda::Sm90Backward::kName, problem, device);
  const cuda::EmulatedHopperBackward& kernels = cuda::hopper_backward_named(label);
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

void run_wide_backward(const std::string& label, const AttentionBackward& args,
                       Emulation& emulation) {
  const GradientProblem problem = validate(problem_of(args), "test");
  cuda::DeviceTraits device = cuda::typical_device(9, 0);
  device.num_sms = 1;  // a CTA computes several tiles again
  const cuda::BackwardPlan plan =
      cuda::choose_backward_by(cuda::Sm90WideBackward::kName, problem, device);
  const cuda::EmulatedWideBackward& kernels = cuda::wide_backward_named(label);
  const auto call = prepared<cuda::Sm90WideBackward>(problem, plan, args, kernels, emulation);
  emulation.is_dependent = true;
  if (call.num_clear_ctas > 0)
    emulation.launch({.x = call.num_clear_ctas}, cuda::kClearThreads, 0,
                     [&] { kernels.clear(call.clear); });
  std::size_t num_redone = 0;
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const cuda::BackwardStep& step = plan.steps[i];
    if (step.is_walk()) {
      emulation.launch(
          {.x = call.common.num_ctas[i]}, static_cast<std::uint32_t>(step.spec->num_warps) * 32,
          step.shared_bytes,
          [&] { (step.spec.owner()->owns_keys ? kernels.keys : kernels.queries)(call.params); });
    } else if (step.is_redo()) {
      run_redo(step, call.redo[i], kernels.redo[num_redone++], emulation);
    }
  }
  emulation.is_dependent = false;
  run_sinks(plan, call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

void run_one_walk(const std::string& label, const AttentionBackward& args, int ctas_at_once,
                  Emulation& emulation) {
  const GradientProblem problem = validate(problem_of(args), "test");
  cuda::DeviceTraits device = cuda::typical_device(8, 0);
  device.l2_bytes = 1 << 18;  // heads come in several sections
  device.num_sms = 1;         // a CTA computes several tiles again
  const cuda::BackwardPlan plan =
      cuda::choose_backward_by(cuda::Sm80OneWalk::kName, problem, device);
  const cuda::EmulatedOneWalk& kernels = cuda::one_walk_named(label);
  const auto call = prepared<cuda::Sm80OneWalk>(problem, plan, args, kernels, emulation);
  const auto threads = static_cast<std::uint32_t>(plan.steps[0].spec->num_warps) * 32;
  emulation.launch({.x = call.num_clear_ctas}, threads, 0, [&] { kernels.clear(call.clear); });
  emulation.ctas_at_once = ctas_at_once;
  emulation.launch({.x = call.num_ctas}, threads, plan.steps[0].shared_bytes,
                   [&] { kernels.main(call.params); });
  emulation.ctas_at_once = 1;
  emulation.launch({.x = call.num_finish_ctas}, threads, 0, [&] { kernels.finish(call.params); });
  std::size_t num_redone = 0;
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    if (plan.steps[i].is_redo())
      run_redo(plan.steps[i], call.redo[i], kernels.redo[num_redone++], emulation);
  }
  run_sinks(plan, call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

}  // namespace fovea::testing
