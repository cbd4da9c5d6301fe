// The entry point of forward mode: find the plan of this problem or make it, then run it.
#include "fovea/jvp.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "cpu/attention_jvp.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"
#include "problem/jvp.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_jvp";

std::string obstacle_of(const JvpProblem& problem) {
  std::vector<NamedSpec> tensors{{"q_tangent", problem.q_tangent},
                                 {"k_tangent", problem.k_tangent},
                                 {"v_tangent", problem.v_tangent},
                                 {"out_tangent", problem.out_tangent}};
  for (const auto& [name, spec] : problem.captured_tangents) tensors.push_back({name, spec});
  return why_not_cpu(problem.forward, tensors);
}

/// Rounding P (S' - r) costs out' more than rounding P costs out: bf16 only where somebody asks.
JvpProblem with_products(JvpProblem problem) {
  Problem& f = problem.forward;
  const bool asks_for_bf16 =
      f.cpu_target == CpuTarget::avx512_bf16 || f.cpu_target == CpuTarget::amx_bf16;
  if (f.compute_dtype == ComputeDtype::automatic && !asks_for_bf16)
    f.compute_dtype = ComputeDtype::f32;
  return problem;
}

int num_threads_of(const JvpProblem& problem) {
  return problem.forward.num_threads > 0 ? problem.forward.num_threads : default_num_threads();
}

JvpPlan make_plan(const JvpProblem& problem, std::string_view where) {
  const FloatEnvironment environment;
  if (const std::string obstacle = obstacle_of(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", where, obstacle));
  auto impl = std::make_shared<JvpPlan::Impl>();
  impl->problem = validate(with_products(problem), where);
  impl->cpu = cpu::plan_jvp(impl->problem, num_threads_of(problem));
  return JvpPlan(std::move(impl));
}

}  // namespace

JvpPlan plan_jvp(const JvpProblem& problem) { return make_plan(problem, "plan_jvp"); }

std::size_t JvpPlan::workspace_bytes() const {
  return unaligned_workspace_bytes(impl_->cpu.workspace_bytes);
}

Explanation JvpPlan::explain() const {
  const FloatEnvironment environment;
  return explain_jvp(impl_->problem, impl_->cpu, MaskData::gone);
}

Explanation explain(const JvpProblem& problem) {
  const FloatEnvironment environment;
  const TangentProblem validated = validate(with_products(problem), "explain");
  const std::string obstacle = obstacle_of(problem);
  if (obstacle.empty()) {
    return explain_jvp(validated, cpu::try_plan_jvp(validated, num_threads_of(problem)),
                       MaskData::lent);
  }
  cpu::JvpPlan nothing;
  nothing.forward.refused.push_back({"cpu/attention_jvp", obstacle});
  return explain_jvp(validated, nothing, MaskData::lent);
}

void JvpPlan::run(const AttentionJvp& args) const {
  const FloatEnvironment environment;
  validate_arguments(impl_->problem, args, kWhere);
  require_workspace(kWhere, args.workspace, workspace_bytes(), "JvpPlan::workspace_bytes");
  Executor& executor = args.forward.executor != nullptr ? *args.forward.executor
                                                        : Runtime::process_default().executor();
  const int num_workers = impl_->cpu.forward.num_workers;
  require_workers(kWhere, executor, num_workers);
  cpu::attention_jvp(impl_->problem, impl_->cpu, args,
                     aligned_workspace(args.workspace, impl_->cpu.workspace_bytes), executor);
}

JvpProblem problem_of(const AttentionJvp& args) {
  JvpProblem problem{.forward = problem_of(args.forward),
                     .q_tangent = args.q_tangent.spec(),
                     .k_tangent = args.k_tangent.spec(),
                     .v_tangent = args.v_tangent.spec(),
                     .out_tangent = args.out_tangent.spec(),
                     .has_sinks_tangent = static_cast<bool>(args.sinks_tangent),
                     .wants_lse_tangent = static_cast<bool>(args.lse_tangent)};
  for (const CapturedTensor& tangent : args.captured_tangents)
    problem.captured_tangents.push_back({tangent.name, tangent.view.spec()});
  return problem;
}

void attention_jvp(const AttentionJvp& args, Runtime& runtime) {
  const FloatEnvironment environment;
  CallLog log(kWhere);
  AttentionJvp call = args;
  if (call.forward.executor == nullptr) call.forward.executor = &runtime.executor();
  if (!call.forward.out) {
    invalid(std::string(kWhere),
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  }
  JvpProblem problem = problem_of(call);
  problem.forward.num_threads = call.forward.executor->concurrency();
  const JvpPlan plan = runtime.impl().find_or_make(problem_key(problem), [&] {
    return log.timed_plan([&] { return make_plan(problem, kWhere); });
  });
  const CallWorkspace workspace(call.workspace, plan.workspace_bytes(), {}, runtime.impl());
  call.workspace = workspace.bytes();
  plan.run(call);
  if (log.is_on()) [[unlikely]] {
    log.write(describe(plan.impl().problem.forward), "cpu/attention_jvp",
              name(plan.impl().cpu.forward.spec.target));
  }
}

void attention_jvp(const AttentionJvp& args) { attention_jvp(args, Runtime::process_default()); }

}  // namespace fovea
