#include "cuda/forward/staged.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "fovea/error.hpp"

#include "core/env.hpp"
#include "core/verbose.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/forward/choices.hpp"
#include "cuda/forward/kernels.hpp"
#include "cuda/forward/sm80.hpp"

namespace fovea::cuda {
namespace {

/// The same problem by the kernel that compiles soonest; empty where none does.
std::optional<ForwardPlan> quickest_plan(const ForwardProblem& problem, const ForwardPlan& plan) {
  const auto spec = Sm80Forward::quickest(problem, plan.device);
  if (!spec || AnyForwardSpec(*spec) == plan.spec) return std::nullopt;
  return plan_choice(problem, plan.device, {&candidate_named(Sm80Forward::kName), *spec});
}

/// Would loading it start a compiler, and one that is there?
bool must_compile(jit::Loader& loader, const driver::DeviceContext& context,
                  const ForwardPlan& plan) {
  bool is_any_missing = false;
  for (const PlannedKernel& kernel : planned_kernels(plan)) {
    if (loader.is_in_memory(kernel.text, context)) continue;
    const auto found = loader.look_for(kernel.text, jit::architecture_of(context.info()));
    if (!found.why_missing.empty()) return false;
    is_any_missing = is_any_missing || found.source == jit::KernelSource::compiler;
  }
  return is_any_missing;
}

/// What any outcome of ForwardLadder::load_or_fall_back takes.
std::size_t most_workspace_bytes(const ForwardProblem& problem, const ForwardPlan& plan) {
  if (!plan.is_tuned) return plan.workspace_bytes;
  return std::max(plan.workspace_bytes, choose_forward(problem, plan.device).workspace_bytes);
}

/// A line of FOVEA_VERBOSE, of no call: those that begin from now on have `last` in theirs.
void log_takeover(const CallLog& log, const ForwardProblem& problem, std::string_view first,
                  std::string_view last) {
  if (!log.is_on()) return;
  log.write(describe(problem), fmt::format("{} takes over from {}", last, first),
            to_string(problem.device()));
}

/// Compiles `plan` behind calls that run by `first`.
std::shared_ptr<const ForwardPlan::Later> start_later(jit::Loader& loader,
                                                      const driver::DeviceContext& context,
                                                      const ForwardProblem& problem,
                                                      std::string_view first, ForwardPlan plan) {
  using Load = std::packaged_task<std::shared_ptr<const ForwardPlan>()>;
  const std::string candidate = plan.candidate;
  auto load = std::make_shared<Load>(
      [&loader, &context, problem, first = std::string(first), plan = std::move(plan)]() mutable {
        const CallLog log("staged plan");
        ForwardLadder::load_or_fall_back(loader, context, problem, plan);
        log_takeover(log, problem, first, plan.candidate);
        return std::make_shared<const ForwardPlan>(std::move(plan));
      });
  auto later = std::make_shared<const ForwardPlan::Later>(
      ForwardPlan::Later{candidate, load->get_future().share()});
  loader.start_in_background([load, wanted = std::weak_ptr(later)] {
    if (!wanted.expired()) (*load)();
  });
  return later;
}

bool is_settled(const ForwardPlan::Later& later) {
  return later.plan.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

/// Waits for it.
const ForwardPlan& settled(const ForwardPlan::Later& later) {
  try {
    return *later.plan.get();
  } catch (const std::future_error&) {
    throw CompileError(fmt::format("{} is not compiled: the process ends", later.candidate));
  }
}

bool is_part_final(const ForwardPlan& plan) {
  return plan.later == nullptr || &current_stage(plan) != &plan;
}

void wait_for_part(const ForwardPlan& plan) {
  if (plan.later == nullptr) return;
  // A child of the process that compiles would wait for a thread that it does not have.
  if (!plan.kernels->context().driver().is_usable())
    throw DeviceError(std::string(driver::kForked));
  settled(*plan.later);
}

}  // namespace

bool has_stages(const ForwardProblem& problem) {
  CompileMode mode = problem.problem.compile_mode;
  if (mode == CompileMode::automatic) {
    const Environment environment = read_environment();
    if (!environment.compile) return false;
    const auto parsed = parse_compile_mode(*environment.compile);
    if (!parsed) {
      throw InvalidArgument(
          fmt::format("FOVEA_COMPILE is '{}'; expected complete or staged", *environment.compile));
    }
    mode = *parsed;
  }
  return mode == CompileMode::staged;
}

ForwardPlan load_in_stages(jit::Loader& loader, const driver::DeviceContext& context,
                           const ForwardProblem& problem, ForwardPlan plan) {
  std::optional<ForwardPlan> first;
  if (must_compile(loader, context, plan)) first = quickest_plan(problem, plan);
  if (!first) {
    ForwardLadder::load_or_fall_back(loader, context, problem, plan);
    return plan;
  }
  // Not beside the other: two compilations at once take each other's time.
  ForwardLadder::load(loader, context, *first);
  first->workspace_bytes = std::max(first->workspace_bytes, most_workspace_bytes(problem, plan));
  first->refused = plan.refused;
  first->refused.push_back({plan.candidate, "is being compiled; runs the calls after that"});
  first->later = start_later(loader, context, problem, first->candidate, std::move(plan));
  return std::move(*first);
}

const ForwardPlan& current_stage(const ForwardPlan& plan) {
  if (plan.later == nullptr || !is_settled(*plan.later)) return plan;
  return settled(*plan.later);
}

bool is_final(const ForwardPlan& plan) {
  return is_part_final(plan) && (plan.few == nullptr || is_part_final(plan.few->plan));
}

void wait_for_final(const ForwardPlan& plan) {
  wait_for_part(plan);
  if (plan.few != nullptr) wait_for_part(plan.few->plan);
}

void tell_stages(const ForwardProblem& problem, ForwardPlan& plan) {
  if (plan.candidate.empty()) return;
  const std::optional<ForwardPlan> first = quickest_plan(problem, plan);
  if (!first) return;
  plan.kernel_source +=
      fmt::format("; where that compiles, {} runs the calls until it has", first->candidate);
}

}  // namespace fovea::cuda
