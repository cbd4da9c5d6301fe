#include "plan/recipe_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "cpu/quantized/attention_quantized.hpp"
#include "cuda/forward/sm90_quantized.hpp"
#include "plan/plan.hpp"

namespace fovea {
namespace {

/// Named recipes that state an error, largest first.
std::vector<NamedQuantization> by_error() {
  std::vector<NamedQuantization> named;
  for (const NamedQuantization& each : quantizations()) {
    if (each.error > 0) named.push_back(each);
  }
  std::ranges::stable_sort(named, std::ranges::greater(), &NamedQuantization::error);
  return named;
}

/// Below, rounding k and v costs a call on the CPU more than products of eight bits save.
constexpr std::int64_t kFewestRowsOnCpu = 1024;

std::string refusal_of(const Explanation::Refused& refused) {
  return fmt::format("{}: {}", refused.candidate, refused.reason);
}

/// docs/kernels/attention_quantized_cpu.md has what was measured.
std::string obstacle_on_cpu(const ForwardProblem& f) {
  const std::int64_t rows = f.group * f.seqlen_q;
  if (rows < kFewestRowsOnCpu)
    return fmt::format("{} rows share a kv head; it is faster from {} on", rows, kFewestRowsOnCpu);
  const cpu::ForwardPlan plan = cpu::try_plan_forward(f, 1);
  if (plan.candidate.empty()) return refusal_of(plan.refused.front());
  const Quantization& quant = f.problem.quant;
  if (cpu::has_fastest_products(plan, quant)) return "";
  return fmt::format("products of {} on {} are no faster", cpu::quantized_products(plan, quant),
                     name(plan.spec.target));
}

/// Of kernels of GPUs that take recipes one was measured beside 16 bits.
std::string obstacle_on_gpu(const ForwardProblem& f) {
  const cuda::ForwardPlan plan = cuda::try_plan_forward(f, f.device());
  if (plan.candidate.empty()) return refusal_of(plan.refused.front());
  if (plan.candidate != cuda::Sm90ForwardQuantized::kName)
    return fmt::format("{}: not measured beside 16 bits", plan.candidate);
  const std::string why = cuda::Sm90ForwardQuantized::why_slower(f);
  return why.empty() ? "" : fmt::format("{}: {}", plan.candidate, why);
}

}  // namespace

RecipeChoice choose_recipe(const Problem& problem, const RecipeObstacle& obstacle) {
  const float accuracy = problem.quant.accuracy;
  if (accuracy == 0) return {.quant = problem.quant};
  RecipeChoice choice;
  const auto refuse = [&](std::string_view name, const std::string& reason) {
    choice.refused.push_back({fmt::format("quant {}", name), reason});
  };
  for (const NamedQuantization& named : by_error()) {
    if (named.error > accuracy) {
      refuse(named.name, fmt::format("its error is {}; {} is allowed", named.error, accuracy));
      continue;
    }
    Problem posed = problem;
    posed.quant = named.quant;
    if (const std::string reason = obstacle(posed); !reason.empty()) {
      refuse(named.name, reason);
      continue;
    }
    choice.quant = named.quant;
    choice.why =
        fmt::format("{}: its error is {}, {} is allowed", named.name, named.error, accuracy);
    return choice;
  }
  choice.why = fmt::format("none: no recipe is within {} and faster here", accuracy);
  return choice;
}

std::string recipe_obstacle(const Problem& problem) {
  const ForwardProblem f = validate(problem, "plan");
  return is_cpu(f.device()) ? obstacle_on_cpu(f) : obstacle_on_gpu(f);
}

Chosen with_chosen_recipe(const Problem& problem) {
  Chosen chosen{.problem = problem, .choice = choose_recipe(problem, recipe_obstacle)};
  chosen.problem.quant = chosen.choice.quant;
  return chosen;
}

void explain_choice(const RecipeChoice& choice, Explanation& explanation) {
  explanation.quant = choice.why;
  explanation.refused.insert(explanation.refused.begin(), choice.refused.begin(),
                             choice.refused.end());
}

}  // namespace fovea
