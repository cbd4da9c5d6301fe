// The entry point of gradients: find the plan of this problem or make it, then run it.
#include "fovea/backward.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_backward";

std::string obstacle_of(const BackwardProblem& problem) {
  std::vector<NamedSpec> tensors{
      {"dout", problem.dout}, {"dq", problem.dq}, {"dk", problem.dk}, {"dv", problem.dv}};
  for (const auto& [name, spec] : problem.dcaptured) tensors.push_back({name, spec});
  return why_not_cpu(problem.forward, tensors);
}

int num_threads_of(const BackwardProblem& problem) {
  return problem.forward.num_threads > 0 ? problem.forward.num_threads : default_num_threads();
}

BackwardPlan make_plan(const BackwardProblem& problem, std::string_view where) {
  const FloatEnvironment environment;
  if (const std::string obstacle = obstacle_of(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", where, obstacle));
  auto impl = std::make_shared<BackwardPlan::Impl>();
  impl->problem = validate(problem, where);
  impl->cpu = cpu::plan_backward(impl->problem, num_threads_of(problem));
  return BackwardPlan(std::move(impl));
}

void run_checked(const BackwardPlan& plan, const AttentionBackward& args) {
  const BackwardPlan::Impl& impl = plan.impl();
  validate_arguments(impl.problem, args, kWhere);
  require_workspace(kWhere, args.workspace, plan.workspace_bytes(),
                    "BackwardPlan::workspace_bytes");
  Executor& executor =
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor();
  require_workers(kWhere, executor, impl.cpu.num_workers);
  cpu::attention_backward(impl.problem, impl.cpu, args,
                          aligned_workspace(args.workspace, impl.cpu.workspace_bytes), executor);
}

void log_call(const CallLog& log, const BackwardPlan::Impl& plan) {
  if (!log.is_on()) [[likely]]
    return;
  log.write(describe(plan.problem), "cpu/attention_backward", name(plan.cpu.spec.target));
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& problem) {
  return make_plan(problem, "plan_backward");
}

std::size_t BackwardPlan::workspace_bytes() const {
  return unaligned_workspace_bytes(impl_->cpu.workspace_bytes);
}

Explanation BackwardPlan::explain() const {
  const FloatEnvironment environment;
  return explain_backward(impl_->problem, impl_->cpu, MaskData::gone);
}

Explanation explain(const BackwardProblem& problem) {
  const FloatEnvironment environment;
  const GradientProblem g = validate(problem, "explain");
  const std::string obstacle = obstacle_of(problem);
  if (obstacle.empty())
    return explain_backward(g, cpu::try_plan_backward(g, num_threads_of(problem)), MaskData::lent);
  cpu::BackwardPlan nothing;
  nothing.refused.push_back({"cpu/attention_backward", obstacle});
  return explain_backward(g, nothing, MaskData::lent);
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
  if (call.executor == nullptr) call.executor = &runtime.executor();
  if (!call.forward.out)
    invalid(std::string(kWhere), "forward.out is missing; expected what attention_forward wrote");
  BackwardProblem problem = problem_of(call);
  problem.forward.num_threads = call.executor->concurrency();
  const BackwardPlan plan = runtime.impl().find_or_make(problem_key(problem), [&] {
    return log.timed_plan([&] { return make_plan(problem, kWhere); });
  });
  const CallWorkspace workspace(call.workspace, plan.workspace_bytes(), {}, runtime.impl());
  call.workspace = workspace.bytes();
  run_checked(plan, call);
  log_call(log, plan.impl());
}

void attention_backward(const AttentionBackward& args) {
  attention_backward(args, Runtime::process_default());
}

}  // namespace fovea
