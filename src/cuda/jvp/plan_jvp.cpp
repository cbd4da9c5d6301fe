// The choice of a kernel for tangents and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/check.hpp"
#include "cuda/jvp/attention_jvp.hpp"
#include "cuda/jvp/candidates.hpp"
#include "cuda/jvp/launch.hpp"
#include "cuda/kernel_unit.hpp"
#include "expr/differentiate.hpp"
#include "expr/print_cuda.hpp"

namespace fovea::cuda {
namespace {

JvpPlan refused_by_all(const std::string& reason) {
  JvpPlan plan;
  for (const JvpCandidate& candidate : jvp_candidates())
    plan.refused.push_back({std::string(candidate.name), reason});
  return plan;
}

/// All of a plan that no kernel decides; program is null where its captures are refused.
JvpPlan plan_programs(const TangentProblem& problem, const DeviceTraits& device) {
  const ScoreMod& score = problem.forward.problem.score;
  const MaskMod& mask = problem.forward.problem.mask;
  const std::vector<CapturedTensor> tangents = captured_tangents_of(problem.posed);
  auto program =
      std::make_shared<const expr::CudaProgram>(expr::print_cuda_tangent(score, mask, tangents));
  if (const auto reason = captures_refusal(*program)) return refused_by_all(*reason);
  JvpPlan plan;
  plan.device = device;
  plan.tangent_slots = expr::tangent_slots(score.expr().shared(), tangents);
  const fovea::Captures captures = captures_with_tangents(score, plan.tangent_slots, tangents);
  plan.capture_slots = CaptureSlots(*program, {captures, mask.captures()});
  plan.range_tables = RangeTables(*program);
  plan.workspace_bytes =
      plan.range_tables.workspace_bytes(plan.capture_slots.bind({captures, mask.captures()}));
  plan.program = std::move(program);
  return plan;
}

void take(const JvpCandidate& candidate, const TangentProblem& problem, JvpPlan& plan) {
  plan.candidate = candidate.name;
  plan.spec = candidate.choose(problem, plan.device);
  plan.shared_bytes = candidate.shared_bytes(plan.spec);
  const std::int64_t columns = plan.spec.head_dim_v;
  plan.num_launches = static_cast<int>(
      std::max<std::int64_t>(1, (problem.forward.head_dim_v + columns - 1) / columns));
}

jit::KernelText jvp_text(const JvpPlan& plan) {
  const JvpCandidate& candidate = jvp_candidate_named(plan.candidate);
  return {kernel_unit(
              *plan.program,
              {.header = candidate.header,
               .spec = print_jvp_spec(plan.spec),
               .bounds = fmt::format("{}, {}", plan.spec.num_warps * 32,
                                     std::max(1, plan.spec.ctas_per_sm)),
               .params = "JvpParams",
               .call = fmt::format("{}<fovea::cuda::spec, fovea::cuda::Mods>", candidate.entry)}),
          fmt::format("{} {}", candidate.name.substr(candidate.name.find('/') + 1),
                      describe(plan.spec))};
}

struct JvpOperation {
  using Problem = TangentProblem;
  using Plan = JvpPlan;
  static Plan choose(const Problem& problem, const DeviceTraits& device) {
    return choose_jvp(problem, device);
  }
  static Plan choose_measured(const Problem& problem, const DeviceTraits& device) {
    return choose_jvp(problem, device);
  }
  static PlannedKernels planned_kernels(const Plan& plan) { return cuda::planned_kernels(plan); }
  static Plan refused_by_all(const std::string& reason) { return cuda::refused_by_all(reason); }
};
using JvpLadder = PlanLadder<JvpOperation>;

}  // namespace

PlannedKernels planned_kernels(const JvpPlan& plan) {
  PlannedKernels kernels = {{KernelRole::main, jvp_text(plan)}};
  if (!plan.range_tables.is_empty())
    kernels.push_back({KernelRole::range_tables, range_tables_text()});
  return kernels;
}

JvpPlan choose_jvp(const TangentProblem& problem, const DeviceTraits& device) {
  JvpPlan plan = plan_programs(problem, device);
  if (plan.program == nullptr) return plan;
  for (const JvpCandidate& candidate : jvp_candidates()) {
    if (const auto refusal = candidate.refuses(problem, device)) {
      plan.refused.push_back({std::string(candidate.name), refusal->reason});
      continue;
    }
    take(candidate, problem, plan);
    break;
  }
  return plan;
}

JvpPlan try_plan_jvp(const TangentProblem& problem, Device device) {
  return JvpLadder::try_plan_on(problem, device);
}

void load(jit::Loader& loader, const driver::DeviceContext& context, JvpPlan& plan) {
  JvpLadder::load(loader, context, plan);
}

JvpPlan plan_jvp(const TangentProblem& problem, Device device) {
  return JvpLadder::plan_on(problem, device);
}

void attention_jvp(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                   void* workspace, void* stream_handle) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  const KernelSet& kernels = *plan.kernels;
  const driver::Stream stream(stream_handle);
  const driver::ContextScope scope(kernels.context(), stream.handle());
  const JvpLaunch call = jvp_launch(problem, plan, args, workspace);
  enqueue(kernels, call.launches(plan), stream);
}

}  // namespace fovea::cuda
