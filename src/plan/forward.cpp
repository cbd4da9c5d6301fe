// The door of a forward call: find the plan of this problem or make it, then run it.
#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "fovea/attention.hpp"

#include "core/check.hpp"
#include "core/num_threads.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"

namespace fovea {
namespace {

Plan make_plan(const Problem& problem, std::string_view where) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = validate(problem, where);
  if (const std::string obstacle = why_not_cpu(problem); !obstacle.empty())
    throw Unsupported(fmt::format("{}: {}", where, obstacle));
  impl->cpu = cpu::plan_forward(
      impl->problem, problem.num_threads > 0 ? problem.num_threads : default_num_threads());
  return Plan(std::move(impl));
}

}  // namespace

std::byte* aligned_workspace(std::span<std::byte> workspace, std::size_t bytes) {
  void* start = workspace.data();
  std::size_t space = workspace.size();
  return static_cast<std::byte*>(std::align(kWorkspaceAlignment, bytes, start, space));
}

std::string why_not_cpu(const Problem& problem) {
  for (const auto& [label, spec] :
       {std::pair{"q", &problem.q}, {"k", &problem.k}, {"v", &problem.v}, {"out", &problem.out}}) {
    if (spec->device != Device::cpu()) {
      return fmt::format("{} lives on {}; this operation runs on the cpu only", label,
                         to_string(spec->device));
    }
  }
  return "";
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
  return unaligned_workspace_bytes(impl_->cpu.workspace_bytes);
}

void Plan::run(const AttentionForward& args) const {
  validate_arguments(impl_->problem, args, "attention_forward");
  // Whether fewer bytes would do depends on where they start: refused alike, not by luck.
  if (args.workspace.size() < workspace_bytes()) {
    invalid("attention_forward",
            fmt::format("workspace has {} bytes; expected {}, see Plan::workspace_bytes",
                        args.workspace.size(), workspace_bytes()));
  }
  Executor& executor =
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor();
  if (executor.concurrency() > impl_->cpu.num_workers) {
    invalid(
        "attention_forward",
        fmt::format(
            "executor runs {} workers; expected at most {}, the num_threads of the plan's problem",
            executor.concurrency(), impl_->cpu.num_workers));
  }
  cpu::attention_forward(impl_->problem, impl_->cpu, args,
                         aligned_workspace(args.workspace, impl_->cpu.workspace_bytes), executor);
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
                  .wants_lse = static_cast<bool>(args.lse),
                  .wants_row_max = static_cast<bool>(args.row_max),
                  .compute_dtype = args.compute_dtype,
                  .cpu_target = args.cpu_target,
                  .is_deterministic = args.is_deterministic};
  const TensorView& cu = args.cu_seqlens_q ? args.cu_seqlens_q : args.cu_seqlens_kv;
  if (cu) problem.num_sequences = cu.rank() == 1 ? cu.size(0) - 1 : -1;
  return problem;
}

void attention_forward(const AttentionForward& args, Runtime& runtime) {
  AttentionForward call = args;
  if (call.executor == nullptr) call.executor = &runtime.executor();
  Problem problem = problem_of(call);
  if (!call.out)
    invalid("attention_forward",
            "out is missing; expected a view of writable memory shaped like q with head_dim_v");
  problem.num_threads = call.executor->concurrency();
  const Plan plan = runtime.impl().find_or_make(
      problem_key(problem), [&] { return make_plan(problem, "attention_forward"); });
  std::unique_ptr<std::byte[]> own_workspace;
  if (call.workspace.empty()) {
    own_workspace = std::make_unique_for_overwrite<std::byte[]>(plan.workspace_bytes());
    call.workspace = {own_workspace.get(), plan.workspace_bytes()};
  }
  plan.run(call);
}

void attention_forward(const AttentionForward& args) {
  attention_forward(args, Runtime::process_default());
}

}  // namespace fovea
