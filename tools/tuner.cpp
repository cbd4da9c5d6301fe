#include "tuner.hpp"

#include <algorithm>

namespace fovea::tools {

TuneRow tune(const TunedProblem& tuned, Track& track, std::uint32_t seed, cuda::Tuning& tuning,
             const RaceRules& rules) {
  TuneRow row{.name = tuned.name,
              .problem_class = tuned.problem_class,
              .choices = {},
              .verdict = race(tuned.choices.size(), track, seed, rules)};
  for (const cuda::Winner& choice : tuned.choices) row.choices.push_back(print_choice(choice));
  const Verdict& verdict = row.verdict;
  if (!verdict.is_decided) return row;
  if (verdict.winner == 0) {
    tuning.forget(tuned.device, row.problem_class);
    return row;
  }
  cuda::Winner winner = tuned.choices[verdict.winner];
  winner.us = verdict.seconds * 1e6;
  winner.table_us = verdict.default_seconds * 1e6;
  tuning.set(tuned.device, row.problem_class, std::move(winner));
  return row;
}

double share_of_time(double seconds_left, std::size_t left) {
  return std::max(0.0, seconds_left) / static_cast<double>(std::max<std::size_t>(1, left));
}

}  // namespace fovea::tools
