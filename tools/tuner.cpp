#include "tuner.hpp"

#include <algorithm>

namespace fovea::tools {

TuneRow tune(const TunedProblem& tuned, Track& track, std::uint32_t seed, cuda::Tuning& tuning,
             const RaceRules& rules) {
  TuneRow row{.name = tuned.name,
              .problem_class = cuda::problem_class(tuned.problem),
              .choices = {},
              .verdict = race(tuned.choices.size(), track, seed, rules)};
  for (const cuda::Choice& choice : tuned.choices) row.choices.push_back(print_choice(choice));
  const Verdict& verdict = row.verdict;
  if (!verdict.is_decided) return row;
  if (verdict.winner == 0) {
    tuning.forget(tuned.device, row.problem_class);
    return row;
  }
  const cuda::Choice& winner = tuned.choices[verdict.winner];
  tuning.set(tuned.device, row.problem_class,
             {.candidate = std::string(winner.candidate->name),
              .tile = tile_of(winner.spec),
              .us = verdict.seconds * 1e6,
              .table_us = verdict.default_seconds * 1e6});
  return row;
}

double share_of_time(double seconds_left, std::size_t left) {
  return std::max(0.0, seconds_left) / static_cast<double>(std::max<std::size_t>(1, left));
}

}  // namespace fovea::tools
