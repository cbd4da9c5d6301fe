// The entry point of merge_states: everything is checked before the first row is written.
#include "cpu/merge_states.hpp"

#include <fmt/format.h>

#include <span>
#include <string>
#include <vector>

#include "fovea/state.hpp"

#include "core/check.hpp"
#include "core/float_environment.hpp"
#include "core/num_threads.hpp"
#include "core/shape.hpp"
#include "core/verbose.hpp"
#include "cpu/features.hpp"
#include "cuda/merge/merge_states.hpp"
#include "plan/call_workspace.hpp"
#include "plan/device_kernels.hpp"
#include "plan/plan.hpp"
#include "plan/runtime.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

constexpr std::string_view kWhere = "merge_states";
constexpr std::string_view kSeeWorkspace = "MergeStatesPlan::workspace_bytes";

void check_shapes(const MergeStates& args, const TensorChecks& checks) {
  if (args.out.rank() != 3 && args.out.rank() != 4) {
    checks.refuse(fmt::format(
        "out is {}; expected [batch, seqlen_q, num_heads_q, head_dim_v], or packed [total_q, "
        "num_heads_q, head_dim_v]",
        args.out ? to_string(args.out.spec()) : "missing"));
  }
  if (args.outs.size() != args.lses.size()) {
    checks.refuse(fmt::format("{} outs and {} lses are given; expected one lse for every out",
                              args.outs.size(), args.lses.size()));
  }
  checks.check_float({"out", args.out, true}, shape_of(args.out));
  if (args.lse) checks.check({"lse", args.lse, true}, Dtype::f32, lse_shape(args.out));
  for (std::size_t i = 0; i < args.outs.size(); ++i) {
    checks.check_float({fmt::format("outs[{}]", i), args.outs[i]}, shape_of(args.out));
    checks.check({fmt::format("lses[{}]", i), args.lses[i]}, Dtype::f32, lse_shape(args.out));
  }
}

/// The first state may be merged in place: every row is read before it is written.
void check_overlap(const MergeStates& args, const TensorChecks& checks) {
  OverlapCheck overlap;
  for (std::size_t i = 0; i < args.outs.size(); ++i) {
    const auto same_place = [i](const TensorView& a, const TensorView& b) {
      return i == 0 && a.data() == b.data() && a.spec() == b.spec();
    };
    if (!same_place(args.outs[i], args.out)) overlap.add_input("a state's out", args.outs[i]);
    if (!same_place(args.lses[i], args.lse)) overlap.add_input("a state's lse", args.lses[i]);
  }
  overlap.add_output("out", args.out);
  overlap.add_output("lse", args.lse);
  overlap.add_output("workspace", args.workspace);
  overlap.refuse_overlap(checks);
}

Device device_of(const MergeStates& args) {
  return args.out ? args.out.spec().device : Device::cpu();
}

void check(const MergeStates& args) {
  const TensorChecks checks(kWhere, device_of(args));
  check_shapes(args, checks);
  check_overlap(args, checks);
}

int num_workers_of(const MergeStates& args) {
  return args.executor != nullptr ? args.executor->concurrency() : default_num_threads();
}

std::string_view kernel_of(Device device) {
  return is_cpu(device) ? "cpu/merge_states" : "cuda/common/merge_states";
}

std::string target_of(Device device) {
  return is_cpu(device) ? std::string(name(cpu::best_f32_target())) : to_string(device);
}

void log_merge(const CallLog& log, const MergeStates& args) {
  if (!log.is_on()) [[likely]]
    return;
  const Device device = device_of(args);
  log.write(fmt::format("{} states of {}", args.outs.size(), to_string(args.out.spec())),
            kernel_of(device), target_of(device));
}

/// What a plan serves: the same tensors but for their addresses.
std::vector<TensorSpec> specs_of(const MergeStates& args) {
  std::vector<TensorSpec> specs = {args.out.spec(), args.lse.spec()};
  for (const auto* views : {&args.outs, &args.lses}) {
    for (const TensorView& view : *views) specs.push_back(view.spec());
  }
  return specs;
}

}  // namespace

struct MergeStatesPlan::Impl {
  std::vector<TensorSpec> specs;
  Device device{};
  std::size_t num_states = 0;
  int num_workers = 1;              // cpu
  std::size_t workspace_bytes = 0;  // aligned
  cuda::MergePlan cuda{};
};

MergeStatesPlan plan_merge_states(const MergeStates& args) {
  check_shapes(args, TensorChecks::of_plan("plan_merge_states", device_of(args)));
  auto impl = std::make_shared<MergeStatesPlan::Impl>();
  impl->specs = specs_of(args);
  impl->device = device_of(args);
  impl->num_states = args.outs.size();
  if (is_cpu(impl->device)) {
    impl->num_workers = num_workers_of(args);
    impl->workspace_bytes = cpu::merge_workspace_bytes(args, impl->num_workers);
  } else {
    cuda::refuse_merge(args);
    impl->cuda = find_merge(impl->device, Runtime::process_default());
  }
  return MergeStatesPlan(std::move(impl));
}

std::size_t MergeStatesPlan::workspace_bytes() const {
  return unaligned_workspace_bytes(impl_->workspace_bytes);
}

void MergeStatesPlan::run(const MergeStates& args) const {
  const FloatEnvironment environment;
  const CallLog log(kWhere);
  if (specs_of(args) != impl_->specs) {
    invalid(std::string(kWhere),
            "a tensor has another shape, dtype, stride or device than the plan; expected those of "
            "plan_merge_states");
  }
  check(args);
  if (!is_cpu(impl_->device)) {
    cuda::merge_states(impl_->cuda, args);
    return log_merge(log, args);
  }
  require_workspace(kWhere, args.workspace, workspace_bytes(), kSeeWorkspace);
  Executor& executor =
      args.executor != nullptr ? *args.executor : Runtime::process_default().executor();
  require_workers(kWhere, executor, impl_->num_workers, "those of the plan");
  cpu::merge_states(args, aligned_workspace(args.workspace, impl_->workspace_bytes), executor);
  log_merge(log, args);
}

Explanation MergeStatesPlan::explain() const {
  Explanation e;
  e.problem = fmt::format("merge {} states into {}", impl_->num_states, to_string(impl_->specs[0]));
  e.kernel = kernel_of(impl_->device);
  e.target = target_of(impl_->device);
  e.compute_dtype = "f32";
  for (const TensorSpec& spec : impl_->specs) {
    if (spec.rank == 0) continue;
    e.bytes +=
        static_cast<double>(spec.num_elements()) * static_cast<double>(size_bytes(spec.dtype));
  }
  // A product and a sum for each element of each state.
  e.flops = 2.0 * static_cast<double>(impl_->num_states) *
            static_cast<double>(impl_->specs[0].num_elements());
  e.bound = "memory";
  e.workspace_bytes = workspace_bytes();
  return e;
}

namespace {

void merge_on_cpu(const MergeStates& args, Runtime& runtime) {
  Executor& executor = args.executor != nullptr ? *args.executor : runtime.executor();
  const std::size_t bytes = cpu::merge_workspace_bytes(args, executor.concurrency());
  const std::size_t needed = unaligned_workspace_bytes(bytes);
  if (!args.workspace.empty()) require_workspace(kWhere, args.workspace, needed, kSeeWorkspace);
  const CallWorkspace workspace(args.workspace, needed, {}, runtime.impl());
  cpu::merge_states(args, aligned_workspace(workspace.bytes(), bytes), executor);
}

}  // namespace

void merge_states(const MergeStates& args, Runtime& runtime) {
  const FloatEnvironment environment;
  const CallLog log(kWhere);
  check(args);
  const Device device = device_of(args);
  if (is_cpu(device)) {
    merge_on_cpu(args, runtime);
  } else {
    cuda::merge_states(find_merge(device, runtime), args);
  }
  log_merge(log, args);
}

void merge_states(const MergeStates& args) { merge_states(args, Runtime::process_default()); }

}  // namespace fovea
