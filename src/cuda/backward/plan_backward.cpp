// The choice of kernels for gradients and what they need: asked once per problem.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "core/check.hpp"
#include "cuda/backward/attention_backward.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/backward/choices.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/rounded.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/kernel_unit.hpp"
#include "cuda/params/tensor_params.hpp"
#include "cuda/spec_text.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

constexpr std::size_t kPartAlignment = 256;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

BackwardPlan refused_by_all(const std::string& reason) {
  BackwardPlan plan;
  for (const BackwardCandidate& candidate : backward_candidates())
    plan.refused.push_back({std::string(candidate.name), reason});
  return plan;
}

void place_parts(const BackwardCandidate& candidate, const GradientProblem& g, BackwardPlan& plan) {
  const ScoreMod& score = g.forward.problem.score;
  const MaskMod& mask = g.forward.problem.mask;
  plan.memory.scratch_at = aligned(statistics_bytes(g, plan.delta.has_origins));
  plan.memory.captured_at =
      aligned(plan.memory.scratch_at + candidate.scratch_bytes(plan.steps, g));
  plan.memory.tables_at = aligned(plan.memory.captured_at + plan.captured.memory.bytes);
  plan.workspace_bytes = plan.memory.tables_at +
                         plan.range_tables.workspace_bytes(plan.capture_slots.bind(score, mask));
}

DeltaSpec delta_spec(const GradientProblem& g, bool has_origins, bool has_dependents) {
  const Problem& p = g.forward.problem;
  return {.element = element_of(p.q.dtype),
          .out_element = element_of(p.out.dtype),
          .dout_element = element_of(g.dout.dtype),
          .is_varlen = g.forward.is_varlen,
          .has_origins = has_origins,
          .has_dependents = has_dependents};
}

/// All of a plan that no kernel decides; program is null where its captures are refused.
BackwardPlan plan_programs(const GradientProblem& problem, const DeviceTraits& device) {
  const Problem& p = problem.forward.problem;
  auto program =
      std::make_shared<const expr::CudaProgram>(expr::print_cuda_gradient(p.score, p.mask));
  if (const auto reason = captures_refusal(*program)) return refused_by_all(*reason);
  BackwardPlan plan;
  plan.device = device;
  plan.program = std::move(program);
  return plan;
}

void take(const BackwardCandidate& candidate, std::vector<BackwardStep> steps,
          const GradientProblem& g, BackwardPlan& plan) {
  plan.candidate = candidate.name;
  plan.delta = delta_spec(g, candidate.has_origins(g), candidate.is_chained);
  plan.wants_dsinks = g.wants_dsinks;
  plan.steps = std::move(steps);
  plan.captured =
      plan_captured(g, plan.device, !plan.steps.empty() && plan.steps.front().spec.stores_pairs());
  FOVEA_ASSERT(plan.captured.is_empty() || plan.delta.has_origins);
  if (!plan.steps.empty()) plan.shared_bytes = plan.steps.front().shared_bytes;
  plan.capture_slots = CaptureSlots(*plan.program, g.forward.problem.score, g.forward.problem.mask);
  plan.range_tables = RangeTables(*plan.program);
  place_parts(candidate, g, plan);
}

/// The bodies of wgmma for one element: a unit reads those that it uses.
std::string include_of_products(const BackwardStep& step) {
  if (!step.multiplies_by_wgmma) return "";
  return fmt::format("#include \"ptx/generated/wgmma_{}.cuh\"\n", name(step.spec->element));
}

jit::KernelText step_text(const BackwardPlan& plan, const BackwardStep& step) {
  const BackwardCandidate& candidate = backward_candidate_named(plan.candidate);
  const BackwardSpec& spec = *step.spec;
  const auto own_or = [](std::string_view own, std::string_view other) {
    return own.empty() ? other : own;
  };
  const std::string_view entry = own_or(step.entry, candidate.entry);
  return {
      include_of_products(step) +
          kernel_unit(*plan.program,
                      {.header = own_or(step.header, candidate.header),
                       .spec = step.spec.print(),
                       .bounds = fmt::format("{}, {}", spec.num_warps * 32, spec.ctas_per_sm),
                       .params = own_or(step.params, candidate.params),
                       .call = fmt::format("{}<fovea::cuda::spec, fovea::cuda::Mods>", entry)}),
      fmt::format("{} {}",
                  step.entry.empty() ? candidate.name.substr(candidate.name.find('/') + 1) : entry,
                  step.spec.describe())};
}

jit::KernelText delta_text(const BackwardPlan& plan) {
  return {
      kernel_unit(*plan.program, {.header = "common/backward_delta.cuh",
                                  .spec = print_delta_spec(plan.delta),
                                  .bounds = std::to_string(kDeltaThreads),
                                  .params = "BackwardParams",
                                  .call = "backward_delta<fovea::cuda::spec, fovea::cuda::Mods>"}),
      "common/backward_delta"};
}

jit::KernelText sinks_text(const BackwardPlan& plan) {
  return {fmt::format("#include \"common/backward_sinks.cuh\"\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::BackwardParams p) {{\n"
                      "  fovea::cuda::backward_sinks<{}>(p);\n}}\n",
                      kSinkThreads, jit::kEntryName, plan.delta.is_varlen),
          "common/backward_sinks"};
}

struct BackwardOperation {
  using Problem = GradientProblem;
  using Plan = BackwardPlan;
  static Plan choose(const Problem& problem, const DeviceTraits& device) {
    return choose_backward(problem, device);
  }
  static Plan choose_measured(const Problem& problem, const DeviceTraits& device) {
    return choose_backward(problem, device, process_tuning());
  }
  static PlannedKernels planned_kernels(const Plan& plan) { return cuda::planned_kernels(plan); }
  static PlannedKernels planned_inner_kernels(const Plan& plan) {
    return planned_forward_kernels(plan);
  }
  static void load_inner(jit::Loader& loader, const driver::DeviceContext& context, Plan& plan) {
    if (plan.rounded != nullptr) ForwardLadder::load(loader, context, plan.rounded->forward);
  }
  static Plan refused_by_all(const std::string& reason) { return cuda::refused_by_all(reason); }
};
using BackwardLadder = PlanLadder<BackwardOperation>;

}  // namespace

PlannedKernels planned_kernels(const BackwardPlan& plan) {
  PlannedKernels kernels = {{KernelRole::delta, delta_text(plan)}};
  for (const BackwardStep& step : plan.steps) kernels.push_back({step.role, step_text(plan, step)});
  if (plan.wants_dsinks) kernels.push_back({KernelRole::sinks, sinks_text(plan)});
  add_captured_kernels(plan.captured, kernels);
  if (!plan.range_tables.is_empty())
    kernels.push_back({KernelRole::range_tables, range_tables_text()});
  if (plan.rounded != nullptr)
    std::ranges::move(quantize_kv_kernels(plan.rounded->spec), std::back_inserter(kernels));
  return kernels;
}

PlannedKernels planned_forward_kernels(const BackwardPlan& plan) {
  if (plan.rounded == nullptr) return {};
  return planned_kernels(plan.rounded->forward);
}

BackwardTile tile_of(const BackwardPlan& plan) {
  if (plan.steps.empty() && !plan.captured.is_empty())
    return {plan.captured.spec.tile_owned, plan.captured.spec.tile_walked};
  if (plan.steps.empty()) return {};
  const OwnerSpec* spec = plan.steps.front().spec.owner();
  if (spec == nullptr) return {plan.steps.front().spec.key_walk()->tile_q, kSm90BackwardKeys};
  return spec->owns_keys ? BackwardTile{spec->tile_walked, spec->tile_owned}
                         : BackwardTile{spec->tile_owned, spec->tile_walked};
}

ProductDepths product_depths(const BackwardPlan& plan) {
  const int walks = plan.captured.num_walks();
  ProductDepths depths{.qk = walks, .v = walks};
  for (const BackwardStep& step : plan.steps) {
    if (!step.is_walk()) continue;
    const OwnerSpec* spec = step.spec.owner();
    if (spec == nullptr) {
      depths.qk += 3;
      depths.v += 2;
      continue;
    }
    depths.qk += (spec->sums_scores ? 2 : 1) + (step.spec.adds_queries() ? 1 : 0);  // S; dk, dq
    depths.v += (spec->sums_scores ? 1 : 0) + (spec->sums_values ? 1 : 0);          // dP; dv
  }
  return depths;
}

std::string describe_sums(const BackwardPlan& plan) {
  if (plan.steps.empty()) return "";
  const BackwardStep& main = plan.steps.front();
  if (!main.spec.adds_queries()) return "each by one CTA, in registers; the same bits in every run";
  const std::size_t bytes = plan.memory.captured_at - plan.memory.scratch_at;
  if (main.spec.takes_turns()) {
    return fmt::format(
        "dq in the order of keys, in {} bytes of the workspace; the same bits in every run", bytes);
  }
  return fmt::format(
      "dq in any order, in {} bytes of the workspace; its last bits differ from run to run", bytes);
}

BackwardPlan choose_backward(const GradientProblem& problem, const DeviceTraits& device) {
  return choose_backward(problem, device, TuningFile{});
}

namespace {

/// By the recipe's rounding, then as without one.
BackwardPlan choose_rounded(const GradientProblem& g, const DeviceTraits& device,
                            const TuningFile& tuning) {
  BackwardPlan plan;
  if (const auto refusal = refuses_rounding(g.forward, device)) {
    plan.refused.push_back({std::string(kRoundingName), refusal->reason});
    return plan;
  }
  auto rounded = std::make_shared<RoundedGradients>(rounded_gradients(g));
  plan = choose_backward(rounded->problem, device, tuning);
  if (plan.candidate.empty()) return plan;
  rounded->forward = choose_forward(rounded->problem.forward, device, tuning);
  if (rounded->forward.candidate.empty()) {
    plan.candidate.clear();
    plan.refused = rounded->forward.refused;
    return plan;
  }
  plan.is_tuned = plan.is_tuned || rounded->forward.is_tuned;
  plan.workspace_bytes = place_rounded(g, plan.workspace_bytes, *rounded);
  plan.rounded = std::move(rounded);
  return plan;
}

}  // namespace

BackwardPlan choose_backward(const GradientProblem& problem, const DeviceTraits& device,
                             const TuningFile& tuning) {
  if (!problem.forward.problem.quant.is_none()) return choose_rounded(problem, device, tuning);
  BackwardPlan plan = plan_programs(problem, device);
  if (plan.program == nullptr) return plan;
  TunedBackwardChoice tuned = tuned_choice(problem, device, tuning);
  plan.is_tuned = tuned.choice.has_value();
  plan.tuning = std::move(tuned.words);
  for (const BackwardCandidate& candidate : backward_candidates()) {
    if (const auto refusal = candidate.refuses(problem, device)) {
      plan.refused.push_back({std::string(candidate.name), refusal->reason});
    } else if (!tuned.choice || tuned.choice->candidate == &candidate) {
      take(candidate,
           tuned.choice ? std::move(tuned.choice->steps) : candidate.choose(problem, device),
           problem, plan);
      break;
    } else {
      plan.refused.push_back({std::string(candidate.name), "another was measured as faster"});
    }
  }
  return plan;
}

BackwardPlan plan_choice(const GradientProblem& problem, const DeviceTraits& device,
                         const BackwardChoice& choice) {
  BackwardPlan plan = plan_programs(problem, device);
  FOVEA_ASSERT(plan.program != nullptr);
  take(*choice.candidate, choice.steps, problem, plan);
  return plan;
}

BackwardPlan choose_backward_by(std::string_view candidate, const GradientProblem& problem,
                                const DeviceTraits& device) {
  BackwardPlan plan = plan_programs(problem, device);
  FOVEA_ASSERT(plan.program != nullptr);
  const BackwardCandidate& named = backward_candidate_named(candidate);
  take(named, named.choose(problem, device), problem, plan);
  return plan;
}

BackwardPlan try_plan_backward(const GradientProblem& problem, Device device) {
  return BackwardLadder::try_plan_on(problem, device);
}

void load(jit::Loader& loader, const driver::DeviceContext& context, BackwardPlan& plan) {
  BackwardLadder::load(loader, context, plan);
}

BackwardPlan plan_backward(const GradientProblem& problem, Device device) {
  return BackwardLadder::plan_on(problem, device);
}

void attention_backward(const GradientProblem& problem, const BackwardPlan& plan,
                        const AttentionBackward& args, void* workspace, void* stream) {
  if (plan.rounded != nullptr)
    return attention_rounded_backward(problem, plan, args, workspace, stream);
  backward_candidate_named(plan.candidate).launch(problem, plan, args, workspace, stream);
}

}  // namespace fovea::cuda
