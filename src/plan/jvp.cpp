// The entry point of forward mode: find the plan of this problem or make it, then run it.
#include "fovea/jvp.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "cpu/attention_jvp.hpp"
#include "cuda/jvp/attention_jvp.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"
#include "problem/jvp.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_jvp";

/// On the CPU. Rounding P (S' - r) costs out' more than rounding P costs out: bf16 only where somebody asks.
JvpProblem with_products(JvpProblem problem) {
  Problem& f = problem.forward;
  const bool asks_for_bf16 =
      f.cpu_target == CpuTarget::avx512_bf16 || f.cpu_target == CpuTarget::amx_bf16;
  if (is_cpu(f.q.device) && f.compute_dtype == ComputeDtype::automatic && !asks_for_bf16)
    f.compute_dtype = ComputeDtype::f32;
  return problem;
}

int num_threads_of(const JvpProblem& problem) {
  return problem.forward.num_threads > 0 ? problem.forward.num_threads : default_num_threads();
}

JvpPlan make_plan(const JvpProblem& problem, std::string_view where) {
  const FloatEnvironment environment;
  auto impl = std::make_shared<JvpPlan::Impl>();
  impl->problem = validate(with_products(problem), where);
  const Device device = impl->problem.forward.device();
  if (is_cpu(device)) {
    impl->backend = cpu::plan_jvp(impl->problem, num_threads_of(problem));
  } else {
    impl->backend = cuda::plan_jvp(impl->problem, device);
  }
  return JvpPlan(std::move(impl));
}

std::size_t workspace_bytes_of(const cpu::JvpPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes);
}

std::size_t workspace_bytes_of(const cuda::JvpPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes, kDeviceWorkspaceAlignment);
}

void run_on(const cpu::JvpPlan& plan, const TangentProblem& problem, const AttentionJvp& args) {
  Executor& executor = args.forward.executor != nullptr ? *args.forward.executor
                                                        : Runtime::process_default().executor();
  require_workers(kWhere, executor, plan.forward.num_workers);
  cpu::attention_jvp(problem, plan, args, aligned_workspace(args.workspace, plan.workspace_bytes),
                     executor);
}

void run_on(const cuda::JvpPlan& plan, const TangentProblem& problem, const AttentionJvp& args) {
  std::byte* workspace =
      aligned_workspace(args.workspace, plan.workspace_bytes, kDeviceWorkspaceAlignment);
  cuda::attention_jvp(problem, plan, args, workspace, args.forward.stream);
}

void write_line(const CallLog& log, const TangentProblem& problem, const cpu::JvpPlan& plan) {
  log.write(describe(problem.forward), "cpu/attention_jvp", name(plan.forward.spec.target));
}

void write_line(const CallLog& log, const TangentProblem& problem, const cuda::JvpPlan& plan) {
  log.write(describe(problem.forward), plan.candidate, to_string(problem.forward.device()));
}

}  // namespace

JvpPlan plan_jvp(const JvpProblem& problem) { return make_plan(problem, "plan_jvp"); }

std::size_t JvpPlan::workspace_bytes() const {
  return std::visit([](const auto& plan) { return workspace_bytes_of(plan); }, impl_->backend);
}

Explanation JvpPlan::explain() const {
  const FloatEnvironment environment;
  return std::visit(
      [&](const auto& plan) { return explain_jvp(impl_->problem, plan, MaskData::gone); },
      impl_->backend);
}

Explanation explain(const JvpProblem& problem) {
  const FloatEnvironment environment;
  const TangentProblem validated = validate(with_products(problem), "explain");
  const Device device = validated.forward.device();
  if (!is_cpu(device))
    return explain_jvp(validated, cuda::try_plan_jvp(validated, device), MaskData::lent);
  return explain_jvp(validated, cpu::try_plan_jvp(validated, num_threads_of(problem)),
                     MaskData::lent);
}

void JvpPlan::run(const AttentionJvp& args) const {
  const FloatEnvironment environment;
  validate_arguments(impl_->problem, args, kWhere);
  require_workspace(kWhere, args.workspace, workspace_bytes(), "JvpPlan::workspace_bytes");
  std::visit([&](const auto& plan) { run_on(plan, impl_->problem, args); }, impl_->backend);
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
  if (!call.forward.out) {
    invalid(std::string(kWhere),
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  }
  JvpProblem problem = problem_of(call);
  const Device device = problem.forward.q.device;
  if (is_cpu(device)) {
    if (call.forward.executor == nullptr) call.forward.executor = &runtime.executor();
    problem.forward.num_threads = call.forward.executor->concurrency();
  }
  const JvpPlan plan = runtime.impl().find_or_make(problem_key(problem), [&] {
    return log.timed_plan([&] { return make_plan(problem, kWhere); });
  });
  const CallWorkspace workspace(call.workspace, plan.workspace_bytes(),
                                {device, call.forward.stream}, runtime.impl());
  call.workspace = workspace.bytes();
  plan.run(call);
  if (log.is_on()) [[unlikely]] {
    const JvpPlan::Impl& made = plan.impl();
    std::visit([&](const auto& backend) { write_line(log, made.problem, backend); }, made.backend);
  }
}

void attention_jvp(const AttentionJvp& args) { attention_jvp(args, Runtime::process_default()); }

}  // namespace fovea
