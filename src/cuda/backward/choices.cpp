#include "cuda/backward/choices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace fovea::cuda {
namespace {

TileChoice tile_of(const Sm90BackwardSpec& spec) {
  return {.tile_q = spec.tile_q,
          .tile_kv = kSm90BackwardKeys,
          .num_warps = spec.num_warps,
          .stages = spec.stages,
          .q_stages = 1,
          .ctas_per_sm = spec.ctas_per_sm,
          .heads_per_tile = 1};
}

TileChoice tile_of(const OwnerSpec& spec) {
  return {.tile_q = spec.owns_keys ? spec.tile_walked : spec.tile_owned,
          .tile_kv = spec.owns_keys ? spec.tile_owned : spec.tile_walked,
          .num_warps = spec.num_warps,
          .stages = spec.stages,
          .q_stages = 1,
          .ctas_per_sm = spec.ctas_per_sm,
          .heads_per_tile = 1};
}

/// Of the steps that walk over all tiles, in their order.
std::vector<TileChoice> tiles_of(const std::vector<BackwardStep>& steps) {
  std::vector<TileChoice> tiles;
  for (const BackwardStep& step : steps) {
    if (!step.is_walk()) continue;
    const OwnerSpec* const owner = step.spec.owner();
    tiles.push_back(owner != nullptr ? tile_of(*owner) : tile_of(*step.spec.key_walk()));
  }
  return tiles;
}

void add_new(const BackwardCandidate& candidate, std::vector<BackwardStep> steps,
             std::vector<BackwardChoice>& choices) {
  const bool is_there = std::ranges::any_of(choices, [&](const BackwardChoice& other) {
    return other.candidate == &candidate && tiles_of(other.steps) == tiles_of(steps);
  });
  if (!is_there && !steps.empty()) choices.push_back({&candidate, std::move(steps)});
}

bool is_same(const Winner& a, const Winner& b) {
  return a.candidate == b.candidate && a.tile == b.tile && a.more_tiles == b.more_tiles;
}

}  // namespace

Winner winner_of(const BackwardChoice& choice) {
  const std::vector<TileChoice> tiles = tiles_of(choice.steps);
  return {.candidate = std::string(choice.candidate->name),
          .tile = tiles.front(),
          .more_tiles = {tiles.begin() + 1, tiles.end()}};
}

std::vector<BackwardChoice> choices_of(const GradientProblem& problem, const DeviceTraits& device) {
  std::vector<BackwardChoice> choices;
  for (const BackwardCandidate& candidate : backward_candidates()) {
    if (candidate.refuses(problem, device)) continue;
    add_new(candidate, candidate.choose(problem, device), choices);
    if (candidate.alternatives == nullptr) continue;
    for (std::vector<BackwardStep>& steps : candidate.alternatives(problem, device))
      add_new(candidate, std::move(steps), choices);
  }
  return choices;
}

std::string problem_class(const GradientProblem& g) {
  std::string text = "gradients of";
  for (const auto& [is_wanted, name] :
       {std::pair{g.wants_dq(), " q"}, {g.wants_dk(), " k"}, {g.wants_dv(), " v"}}) {
    if (is_wanted) text += name;
  }
  if (!g.forward.problem.is_deterministic) text += " in any order";
  return fmt::format("{}: {}", text, problem_class(g.forward));
}

TunedBackwardChoice tuned_choice(const GradientProblem& problem, const DeviceTraits& device,
                                 const TuningFile& file) {
  if (file.where.empty()) return {};
  FoundWinner found = find_winner(problem_class(problem), device, file);
  if (found.winner == nullptr) return {std::nullopt, std::move(found.why_not)};
  std::vector<BackwardChoice> choices = choices_of(problem, device);
  const auto choice = std::ranges::find_if(
      choices, [&](const BackwardChoice& each) { return is_same(winner_of(each), *found.winner); });
  if (choice == choices.end()) return {std::nullopt, describe_missing(*found.winner, file)};
  return {std::move(*choice), describe_taken(*found.winner, file)};
}

}  // namespace fovea::cuda
