#include "kernels/backward/emulated_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cuda/backward/sm80_one_walk.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/backward/sm90_wide.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/backward/backward_steps.hpp"
#include "problem/backward.hpp"

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

}  // namespace

void run_backward(const std::string& label, const AttentionBackward& args, Emulation& emulation) {
  const GradientProblem problem = validate(problem_of(args), "test");
  const cuda::DeviceTraits device = device_of(label);
  const cuda::BackwardPlan plan = plan_of_owners(problem, device);
  emulation.compute_capability = device.compute_capability();
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
  run_key_walk(problem, plan, args, kernels, ctas_at_once, emulation);
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
