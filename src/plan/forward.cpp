// The entry point of a forward call: find the plan of this problem or make it, then run it.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "fovea/attention.hpp"

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "cuda/forward/staged.hpp"
#include "plan/call_workspace.hpp"
#include "plan/plan.hpp"
#include "plan/recipe_choice.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "attention_forward";

Plan make_plan(const Problem& problem, std::string_view where) {
  const FloatEnvironment environment;
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = validate(problem, where);
  if (problem.quant.accuracy > 0) {
    Chosen chosen = with_chosen_recipe(problem);
    impl->problem = validate(chosen.problem, where);
    impl->choice = std::move(chosen.choice);
  }
  if (is_cpu(impl->problem.device())) {
    impl->backend = cpu::plan_forward(
        impl->problem, problem.num_threads > 0 ? problem.num_threads : default_num_threads());
  } else {
    impl->backend = cuda::plan_forward(impl->problem, impl->problem.device());
  }
  return Plan(std::move(impl));
}

std::size_t workspace_bytes_of(const cpu::ForwardPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes);
}

std::size_t workspace_bytes_of(const cuda::ForwardPlan& plan) {
  return unaligned_workspace_bytes(plan.workspace_bytes, kDeviceWorkspaceAlignment);
}

std::string_view run_on(const cpu::ForwardPlan& plan, const ForwardProblem& problem,
                        const AttentionForward& args) {
  Executor& executor =
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor();
  require_workers(kWhere, executor, plan.num_workers);
  cpu::attention_forward(problem, plan, args,
                         aligned_workspace(args.workspace, plan.workspace_bytes), executor);
  return cpu::kernel_name(plan);
}

std::string_view run_on(const cuda::ForwardPlan& plan, const ForwardProblem& problem,
                        const AttentionForward& args) {
  std::byte* workspace =
      aligned_workspace(args.workspace, plan.workspace_bytes, kDeviceWorkspaceAlignment);
  return cuda::attention_forward(problem, plan, args, workspace, args.stream);
}

/// Returns the name of the kernel.
std::string_view run_checked(const Plan& plan, const AttentionForward& args) {
  const ForwardProblem& problem = plan.impl().problem;
  validate_arguments(problem, args, kWhere);
  require_workspace(kWhere, args.workspace, plan.workspace_bytes(), "Plan::workspace_bytes");
  return std::visit([&](const auto& backend) { return run_on(backend, problem, args); },
                    plan.impl().backend);
}

std::string target_of(const cpu::ForwardPlan& plan, const ForwardProblem& /*problem*/) {
  return std::string(name(plan.spec.target));
}

std::string target_of(const cuda::ForwardPlan& /*plan*/, const ForwardProblem& problem) {
  return to_string(problem.device());
}

}  // namespace

void log_call(const CallLog& log, const Plan::Impl& plan, std::string_view kernel) {
  if (!log.is_on()) [[likely]]
    return;
  std::visit(
      [&](const auto& backend) {
        log.write(describe(plan.problem), kernel, target_of(backend, plan.problem));
      },
      plan.backend);
}

// Whether fewer bytes would do depends on where they start: refused alike, not by luck.
void require_workspace(std::string_view where, std::span<const std::byte> workspace,
                       std::size_t bytes, std::string_view see) {
  if (workspace.size() >= bytes) return;
  invalid(std::string(where),
          fmt::format("workspace has {} bytes; expected {}, see {}", workspace.size(), bytes, see));
}

void require_workers(std::string_view where, const Executor& executor, int num_workers,
                     std::string_view whose) {
  if (executor.concurrency() <= num_workers) return;
  invalid(std::string(where), fmt::format("executor runs {} workers; expected at most {}, {}",
                                          executor.concurrency(), num_workers, whose));
}

std::byte* aligned_workspace(std::span<std::byte> workspace, std::size_t bytes,
                             std::size_t alignment) {
  if (bytes == 0) return nullptr;
  void* start = workspace.data();
  std::size_t space = workspace.size();
  return static_cast<std::byte*>(std::align(alignment, bytes, start, space));
}

std::string why_not_cpu(const Problem& problem, std::span<const NamedSpec> others) {
  const auto obstacle_of = [](std::span<const NamedSpec> tensors) -> std::string {
    for (const auto& [name, spec] : tensors) {
      if (is_cpu(spec.device)) continue;
      return fmt::format(
          "{} lives on {}; expected the cpu, the only device that has kernels of this operation",
          name, to_string(spec.device));
    }
    return "";
  };
  const NamedSpec main[] = {
      {"q", problem.q}, {"k", problem.k}, {"v", problem.v}, {"out", problem.out}};
  std::string obstacle = obstacle_of(main);
  return obstacle.empty() ? obstacle_of(others) : obstacle;
}

Problem on_device(Problem problem, Device device) {
  for (TensorSpec* spec : {&problem.q, &problem.k, &problem.v, &problem.out}) spec->device = device;
  return problem;
}

Plan plan(const Problem& problem) { return make_plan(problem, "plan"); }

Plan plan(const Problem& problem, Device device) {
  return make_plan(on_device(problem, device), "plan");
}

std::size_t Plan::workspace_bytes() const {
  return std::visit([](const auto& plan) { return workspace_bytes_of(plan); }, impl_->backend);
}

bool Plan::is_final() const {
  const auto* const cuda = std::get_if<cuda::ForwardPlan>(&impl_->backend);
  return cuda == nullptr || cuda::is_final(*cuda);
}

void Plan::wait() const {
  if (const auto* const cuda = std::get_if<cuda::ForwardPlan>(&impl_->backend))
    cuda::wait_for_final(*cuda);
}

void Plan::run(const AttentionForward& args) const {
  const FloatEnvironment environment;
  const CallLog log("Plan::run");
  const std::string_view kernel = run_checked(*this, args);
  log_call(log, *impl_, kernel);
}

Problem problem_of(const AttentionForward& args) {
  Problem problem{.q = args.q.spec(),
                  .k = args.k.spec(),
                  .v = args.v.spec(),
                  .out = args.out.spec(),
                  .score = args.score,
                  .mask = args.mask,
                  .softmax_scale = args.softmax_scale,
                  .has_sinks = static_cast<bool>(args.sinks),
                  .dropout = {.p = args.dropout.p},
                  .reads_dropout_seed = args.dropout_seed || args.dropout_offset,
                  .has_dropout_places = static_cast<bool>(args.dropout_places),
                  .quant = args.quant,
                  .wants_lse = static_cast<bool>(args.lse),
                  .wants_row_max = static_cast<bool>(args.row_max),
                  .compute_dtype = args.compute_dtype,
                  .cpu_target = args.cpu_target,
                  .is_deterministic = args.is_deterministic,
                  .sm_margin = args.sm_margin};
  const TensorView& cu = args.cu_seqlens_q ? args.cu_seqlens_q : args.cu_seqlens_kv;
  if (cu) problem.num_sequences = cu.rank() == 1 ? cu.size(0) - 1 : -1;
  return problem;
}

void attention_forward(const AttentionForward& args, Runtime& runtime) {
  const FloatEnvironment environment;
  CallLog log(kWhere);
  AttentionForward call = args;
  if (!call.out) {
    invalid(std::string(kWhere),
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  }
  Problem problem = problem_of(call);
  if (is_cpu(problem.q.device)) {
    if (call.executor == nullptr) call.executor = &runtime.executor();
    problem.num_threads = call.executor->concurrency();
  }
  const Plan plan = runtime.impl().find_or_make(problem_key(problem), [&] {
    return log.timed_plan([&] { return make_plan(problem, kWhere); });
  });
  const CallWorkspace workspace(call.workspace, plan.workspace_bytes(),
                                {problem.q.device, call.stream}, runtime.impl());
  call.workspace = workspace.bytes();
  const std::string_view kernel = run_checked(plan, call);
  log_call(log, plan.impl(), kernel);
}

void attention_forward(const AttentionForward& args) {
  attention_forward(args, Runtime::process_default());
}

}  // namespace fovea
