#include "support/gradient_compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "reference/attention_backward.hpp"
#include "reference/attention_jvp.hpp"
#include "support/compare.hpp"
#include "support/plain_formula.hpp"
#include "support/plain_gradients.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {

namespace {

constexpr double kRoundF32 = 0x1p-24;

/// What an output may err by for one reason: `relative` of the largest sum that it is relative to.
struct Reason {
  double relative = 0;
  const std::vector<double>& of;
  bool is_luck = false;  // of few elements: in the norm it counts for 64 of them at most
};

/// As in tolerance.cpp: for problems so small that the plain formula is right by luck.
Floor floor_of(const std::vector<Reason>& reasons) {
  Floor floor;
  for (const Reason& reason : reasons) {
    double largest = 0;
    for (const double each : reason.of) {
      if (std::isfinite(each)) largest = std::max(largest, std::fabs(each));
    }
    const auto count = static_cast<double>(reason.of.size());
    const double absolute = reason.relative * largest;
    floor.absolute += absolute;
    floor.norm += absolute * std::sqrt(reason.is_luck ? std::min(count, 64.0) : count);
  }
  return floor;
}

/// No fp32 evaluation knows a score s better than a few roundings of it, and so a probability;
/// programs and their slopes cost a few more.
double error_of_scores(double largest_score) { return 8 * kRoundF32 * (1 + largest_score); }

/// The oracle's gradients, and how far from them is still right in one compute dtype.
class BackwardJudge {
 public:
  explicit BackwardJudge(const AttentionBackward& args)
      : expected_(reference::attention_backward(args)) {}

  std::string difference_of(const AttentionBackward& args, ComputeDtype compute_dtype) {
    std::optional<PlainBackward>& plain = plain_[compute_dtype == ComputeDtype::bf16 ? 1 : 0];
    if (!plain) plain = plain_backward(args, compute_dtype);
    const double scores = error_of_scores(plain->largest_score);
    const double products =
        rounding(compute_dtype == ComputeDtype::bf16 ? Dtype::bf16 : Dtype::f32, 1);
    const double out = rounding(args.forward.out.dtype(), 1);
    const auto compare = [&](std::string_view name, const TensorView& view, const auto& of) {
      if (!view) return std::string();
      const Floor floor = floor_of({{scores, of(plain->by_scores)},
                                    {products, of(plain->by_products), true},
                                    {out, of(plain->by_out), true}});
      const Tolerance allowed = tolerance(of(plain->values), of(expected_), view.dtype(), floor);
      return difference({name, view, of(expected_), allowed});
    };
    using Result = reference::BackwardResult;
    const auto member = [](std::vector<double> Result::*which) {
      return [which](const Result& result) -> const std::vector<double>& { return result.*which; };
    };
    std::string found = compare("dq", args.dq, member(&Result::dq)) +
                        compare("dk", args.dk, member(&Result::dk)) +
                        compare("dv", args.dv, member(&Result::dv)) +
                        compare("dsinks", args.dsinks, member(&Result::dsinks));
    for (const CapturedTensor& each : args.dcaptured) {
      found += compare("gradient of " + each.name, each.view,
                       [&](const Result& result) -> const std::vector<double>& {
                         return result.dcaptured.at(each.name);
                       });
    }
    return found;
  }

 private:
  reference::BackwardResult expected_;
  std::optional<PlainBackward> plain_[2];
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
    plan_backward(problem_of(args));
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
  const PlainResult plain = plain_formula(memory.forward.args(), ComputeDtype::f32);
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
                           const std::function<void(const AttentionJvp&)>& run) {
  if (problem.forward.compute_dtype == ComputeDtype::bf16) return "";  // refused: products are f32
  GradientMemory memory(problem);
  const AttentionJvp of_case = memory.jvp_args();
  const reference::JvpResult expected = reference::attention_jvp(of_case);
  const PlainJvp plain = plain_jvp(of_case);
  const double scores = error_of_scores(plain.largest_score);
  const Tolerance out_tangent =
      tolerance(plain.out_tangent, expected.out_tangent, of_case.out_tangent.dtype(),
                floor_of({{scores, plain.out_by_scores}}));
  const Tolerance lse_tangent = tolerance(plain.lse_tangent, expected.lse_tangent, Dtype::f32,
                                          floor_of({{scores, plain.lse_by_scores}}));
  const Tolerances forward = tolerances(of_case.forward, expected.forward, ComputeDtype::f32);
  std::string differences;
  std::vector<CpuTarget> targets = targets_for(problem.forward.dtype, ComputeDtype::f32);
  if (run) targets = {CpuTarget::scalar};
  for (const CpuTarget target : targets) {
    memory.forward.poison_outputs();
    memory.poison_outputs();
    const AttentionJvp args = memory.jvp_args(target);
    std::string found;
    try {
      run ? run(args) : attention_jvp(args);
      found = difference({"out", args.forward.out, expected.forward.out, forward.out}) +
              difference({"lse", args.forward.lse, expected.forward.lse, forward.lse}) +
              difference({"out_tangent", args.out_tangent, expected.out_tangent, out_tangent}) +
              difference({"lse_tangent", args.lse_tangent, expected.lse_tangent, lse_tangent}) +
              memory.damage();
    } catch (const Error& error) {
      found += fmt::format("threw: {}\n", error.what());
    }
    if (!found.empty()) differences += found + where(problem, run ? "of the test" : name(target));
  }
  return differences;
}

}  // namespace fovea::testing
