// The entry point of gradients: find the plan of this problem or make it, then run it.
#include "fovea/backward.hpp"

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_backward";

int num_threads_of(const BackwardProblem& problem) {
  return problem.forward.num_threads > 0 ? problem.forward.num_threads : default_num_threads();
}

BackwardPlan make_plan(const BackwardProblem& problem, std::string_view where) {
  const FloatEnvironment environment;
  auto impl = std::make_shared<BackwardPlan::Impl>();
  impl->problem = validate(problem, where);
  const Device device = impl->problem.forward.device();
  if (is_cpu(device)) {
    impl->backend = cpu::plan_backward(impl->problem, num_threads_of(problem));
  } else {
    impl->backend = cuda::plan_backward(impl->problem, device);
  }
  return BackwardPlan(std::move(impl));
}

std::size_t workspace_bytes_of(const cpu::BackwardPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes);
}

std::size_t workspace_bytes_of(const cuda::BackwardPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes, kDeviceWorkspaceAlignment);
}

void run_on(const cpu::BackwardPlan& plan, const GradientProblem& problem,
            const AttentionBackward& args) {
  Executor& executor =
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor();
  require_workers(kWhere, executor, plan.num_workers);
  cpu::attention_backward(problem, plan, args,
                          aligned_workspace(args.workspace, plan.workspace_bytes), executor);
}

void run_on(const cuda::BackwardPlan& plan, const GradientProblem& problem,
            const AttentionBackward& args) {
  std::byte* workspace =
      aligned_workspace(args.workspace, plan.workspace_bytes, kDeviceWorkspaceAlignment);
  cuda::attention_backward(problem, plan, args, workspace, args.stream);
}

void run_checked(const BackwardPlan& plan, const AttentionBackward& args) {
  const GradientProblem& problem = plan.impl().problem;
  validate_arguments(problem, args, kWhere);
  require_workspace(kWhere, args.workspace, plan.workspace_bytes(),
                    "BackwardPlan::workspace_bytes");
  std::visit([&](const auto& backend) { run_on(backend, problem, args); }, plan.impl().backend);
}

std::string target_of(const cpu::BackwardPlan& plan, const GradientProblem& /*problem*/) {
  return std::string(name(plan.spec.target));
}

std::string target_of(const cuda::BackwardPlan& /*plan*/, const GradientProblem& problem) {
  return to_string(problem.forward.device());
}

std::string_view kernel_of(const cpu::BackwardPlan& plan) {
  return plan.rounded != nullptr ? "cpu/attention_quantized_backward" : "cpu/attention_backward";
}

std::string_view kernel_of(const cuda::BackwardPlan& plan) { return plan.candidate; }

void log_call(const CallLog& log, const BackwardPlan::Impl& plan) {
  if (!log.is_on()) [[likely]]
    return;
  std::visit(
      [&](const auto& backend) {
        log.write(describe(plan.problem), kernel_of(backend), target_of(backend, plan.problem));
      },
      plan.backend);
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& problem) {
  return make_plan(problem, "plan_backward");
}

std::size_t BackwardPlan::workspace_bytes() const {
  return std::visit([](const auto& plan) { return workspace_bytes_of(plan); }, impl_->backend);
}

Explanation BackwardPlan::explain() const {
  const FloatEnvironment environment;
  return std::visit(
      [&](const auto& plan) { return explain_backward(impl_->problem, plan, MaskData::gone); },
      impl_->backend);
}

Explanation explain(const BackwardProblem& problem) {
  const FloatEnvironment environment;
  const GradientProblem g = validate(problem, "explain");
  const Device device = g.forward.device();
  if (!is_cpu(device))
    return explain_backward(g, cuda::try_plan_backward(g, device), MaskData::lent);
  return explain_backward(g, cpu::try_plan_backward(g, num_threads_of(problem)), MaskData::lent);
}

Explanation explain_for(const BackwardProblem& problem, std::string_view architecture) {
  const FloatEnvironment environment;
  const auto parsed = cuda::jit::parse_architecture(architecture, "explain");
  const GradientProblem g = validate(problem, "explain");
  const auto plan = cuda::choose_backward(g, cuda::typical_device(parsed));
  Explanation explanation = explain_backward(g, plan, MaskData::lent);
  explanation.target = parsed.name();
  return explanation;
}

void BackwardPlan::run(const AttentionBackward& args) const {
  const FloatEnvironment environment;
  const CallLog log("BackwardPlan::run");
  run_checked(*this, args);
  log_call(log, *impl_);
}

BackwardProblem problem_of(const AttentionBackward& args) {
  BackwardProblem problem{.forward = problem_of(args.forward),
                          .dout = args.dout.spec(),
                          .dq = args.dq.spec(),
                          .dk = args.dk.spec(),
                          .dv = args.dv.spec(),
                          .has_dlse = static_cast<bool>(args.dlse),
                          .wants_dsinks = static_cast<bool>(args.dsinks)};
  problem.forward.wants_lse = true;
  problem.forward.wants_row_max = false;
  for (const CapturedTensor& tensor : args.dcaptured)
    problem.dcaptured.push_back({tensor.name, tensor.view.spec()});
  return problem;
}

void attention_backward(const AttentionBackward& args, Runtime& runtime) {
  const FloatEnvironment environment;
  CallLog log(kWhere);
  AttentionBackward call = args;
  if (!call.forward.out)
    invalid(std::string(kWhere), "forward.out is missing; expected what attention_forward wrote");
  BackwardProblem problem = problem_of(call);
  const Device device = problem.forward.q.device;
  if (is_cpu(device)) {
    if (call.executor == nullptr) call.executor = &runtime.executor();
    problem.forward.num_threads = call.executor->concurrency();
  }
  const BackwardPlan plan = runtime.impl().find_or_make(problem_key(problem), [&] {
    return log.timed_plan([&] { return make_plan(problem, kWhere); });
  });
  const CallWorkspace workspace(call.workspace, plan.workspace_bytes(), {device, call.stream},
                                runtime.impl());
  call.workspace = workspace.bytes();
  run_checked(plan, call);
  log_call(log, plan.impl());
}

void attention_backward(const AttentionBackward& args) {
  attention_backward(args, Runtime::process_default());
}

}  // namespace fovea
