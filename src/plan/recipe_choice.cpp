#include "plan/recipe_choice.hpp"

#include <fmt/format.h>

#include <algorithm>

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
  if (is_cpu(problem.q.device))
    return "cpu/attention_quantized uses no instructions of eight bits: it is no faster";
  const ForwardProblem f = validate(problem, "plan");
  const cuda::ForwardPlan plan = cuda::try_plan_forward(f, f.device());
  if (!plan.candidate.empty()) return "";
  const auto& first = plan.refused.front();
  return fmt::format("{}: {}", first.candidate, first.reason);
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
