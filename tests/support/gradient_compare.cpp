#include "support/gradient_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "reference/attention_backward.hpp"
#include "reference/attention_jvp.hpp"
#include "reference/plain_formula.hpp"
#include "support/compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {

namespace {

/// The oracle's gradients, and how far from them is still right in one compute dtype.
class BackwardJudge {
 public:
  explicit BackwardJudge(const AttentionBackward& args)
      : expected_(reference::attention_backward(args)) {}

  std::string difference_of(const AttentionBackward& args, ComputeDtype compute_dtype) {
    auto& allowed = allowed_[compute_dtype == ComputeDtype::bf16 ? 1 : 0];
    if (!allowed) allowed = tolerances(args, expected_, compute_dtype);
    std::string found = difference({"dq", args.dq, expected_.dq, allowed->dq}) +
                        difference({"dk", args.dk, expected_.dk, allowed->dk}) +
                        difference({"dv", args.dv, expected_.dv, allowed->dv}) +
                        difference({"dsinks", args.dsinks, expected_.dsinks, allowed->dsinks});
    for (const CapturedTensor& each : args.dcaptured) {
      found += difference({"gradient of " + each.name, each.view, expected_.dcaptured.at(each.name),
                           allowed->dcaptured.at(each.name)});
    }
    return found;
  }

 private:
  reference::BackwardResult expected_;
  std::optional<reference::GradientTolerances> allowed_[2];
};

/// Runs the public functions; returns what is wrong beside the gradients, and what was multiplied in:
/// bf16 if either did, as probabilities are made of backward's scores and forward's lse.
struct Ran {
  std::string found;
  ComputeDtype compute_dtype = ComputeDtype::f32;
};
Ran run_public(GradientMemory& memory, AttentionBackward args) {
  AttentionForward forward = args.forward;
  forward.executor = args.executor;
  attention_forward(forward);
  memory.seal_forward();
  BackwardProblem problem = problem_of(args);
  if (args.executor != nullptr) problem.forward.num_threads = args.executor->concurrency();
  const BackwardPlan plan = plan_backward(problem);
  PoisonedWorkspace workspace(plan.workspace_bytes());
  args.workspace = workspace.span();
  attention_backward(args);
  Ran ran;
  if (!workspace.has_intact_guards()) ran.found = "wrote outside of workspace\n";
  const auto multiplies_bf16 = [](const Explanation& explained) {
    return explained.compute_dtype == "bf16";
  };
  if (multiplies_bf16(plan.explain()) || multiplies_bf16(explain(problem.forward)))
    ran.compute_dtype = ComputeDtype::bf16;
  return ran;
}

bool can_run(const AttentionBackward& args) {
  try {
    static_cast<void>(plan_backward(problem_of(args)));
    return true;
  } catch (const Unsupported&) {
    return false;
  }
}

/// Targets that forward and backward both have; and `automatic`, where each takes its own best.
std::vector<CpuTarget> backward_targets(GradientMemory& memory, const Case& problem) {
  std::vector<CpuTarget> targets;
  for (const CpuTarget target : targets_for(problem.dtype, problem.compute_dtype)) {
    if (can_run(memory.args(target))) targets.push_back(target);
  }
  if (!targets.empty()) targets.push_back(CpuTarget::automatic);
  return targets;
}

/// A kernel under test reads out and lse as attention_forward would have written them.
void fill_forward_by_plain_formula(GradientMemory& memory) {
  const reference::PlainResult plain =
      reference::plain_formula(memory.forward.args(), ComputeDtype::f32);
  memory.forward.out.fill([&](std::int64_t i) { return plain.out[static_cast<std::size_t>(i)]; });
  memory.forward.lse.fill([&](std::int64_t i) { return plain.lse[static_cast<std::size_t>(i)]; });
  memory.seal_forward();
}

std::string changed_forward(const GradientMemory& memory) {
  std::string found;
  if (!memory.forward.out.is_unchanged()) found += "input out was written\n";
  if (!memory.forward.lse.is_unchanged()) found += "input lse was written\n";
  return found;
}

std::string where(const GradientCase& problem, std::string_view target) {
  return fmt::format("  in {}\n  target {}\n{}", problem.describe(), target, repeating_command());
}

}  // namespace

std::vector<CpuTarget> gradient_targets_for(Dtype dtype) {
  const GradientCase probe{.forward = {.seqlen_q = 1, .seqlen_kv = 1, .dtype = dtype}};
  GradientMemory memory(probe);
  std::vector<CpuTarget> targets = targets_for(dtype);
  std::erase_if(targets, [&](CpuTarget target) { return !can_run(memory.args(target)); });
  return targets;
}

std::string backward_difference(const GradientCase& problem,
                                const BackwardCompareOptions& options) {
  GradientMemory memory(problem);
  BackwardJudge judge(memory.args());
  const bool is_public = !options.run;
  std::vector<CpuTarget> targets = options.targets;
  if (targets.empty() && is_public) targets = backward_targets(memory, problem.forward);
  if (!is_public) targets = {CpuTarget::scalar};
  if (targets.empty() && problem.forward.compute_dtype != ComputeDtype::bf16)
    return "no target runs this\n" + where(problem, "of any kind");
  std::string differences;
  for (const CpuTarget target : targets) {
    memory.forward.poison_outputs();
    memory.poison_outputs();
    AttentionBackward args = memory.args(target);
    args.executor = options.executor;
    std::string found;
    try {
      Ran ran;
      if (is_public) {
        ran = run_public(memory, args);
      } else {
        fill_forward_by_plain_formula(memory);
        options.run(args);
        ran.compute_dtype = options.products;
      }
      found = ran.found + judge.difference_of(args, ran.compute_dtype) + changed_forward(memory) +
              memory.damage();
    } catch (const Error& error) {
      found += fmt::format("threw: {}\n", error.what());
    }
    if (!found.empty())
      differences += found + where(problem, is_public ? name(target) : "of the test");
  }
  return differences;
}

std::string jvp_difference(const GradientCase& problem,
                           const std::function<void(const AttentionJvp&)>& run,
                           ComputeDtype products_of_run) {
  GradientMemory memory(problem);
  const AttentionJvp of_case = memory.jvp_args();
  const reference::JvpResult expected = reference::attention_jvp(of_case);
  std::array<std::optional<reference::JvpTolerances>, 2> of_products;  // f32, bf16
  std::string differences;
  std::vector<CpuTarget> targets =
      targets_for(problem.forward.dtype, problem.forward.compute_dtype);
  if (run) targets = {CpuTarget::scalar};
  for (const CpuTarget target : targets) {
    const ComputeDtype products =
        run ? products_of_run
            : compute_dtype_on(target, problem.forward.dtype, problem.forward.compute_dtype);
    auto& allowed_here = of_products[products == ComputeDtype::bf16 ? 1 : 0];
    if (!allowed_here) allowed_here = tolerances(of_case, expected, products);
    const reference::JvpTolerances& allowed = *allowed_here;
    memory.forward.poison_outputs();
    memory.poison_outputs();
    const AttentionJvp args = memory.jvp_args(target);
    std::string found;
    try {
      run ? run(args) : attention_jvp(args);
      found =
          difference({"out", args.forward.out, expected.forward.out, allowed.forward.out}) +
          difference({"lse", args.forward.lse, expected.forward.lse, allowed.forward.lse}) +
          difference({"out_tangent", args.out_tangent, expected.out_tangent, allowed.out_tangent}) +
          difference({"lse_tangent", args.lse_tangent, expected.lse_tangent, allowed.lse_tangent}) +
          memory.damage();
    } catch (const Error& error) {
      found += fmt::format("threw: {}\n", error.what());
    }
    if (!found.empty()) differences += found + where(problem, run ? "of the test" : name(target));
  }
  return differences;
}

}  // namespace fovea::testing
