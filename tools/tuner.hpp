// Races between the choices of problems, and what becomes of their verdicts in a tuning. Where the kernels run is not
// known here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/forward/tuning.hpp"
#include "race.hpp"

namespace fovea::tools {

struct TunedProblem {
  std::string name, problem_class;
  cuda::DeviceTraits device;
  std::vector<cuda::Winner> choices;  // choices_of, the table's first; no times
};

/// The verdict of one problem, in the words of a report.
struct TuneRow {
  std::string name, problem_class;
  std::vector<std::string> choices;  // print_choice of each
  Verdict verdict;
};

/// Races the choices and enters the winner under the problem's class. Where the table's choice stands, an entry of this
/// class goes; where nothing was decided, it stays. `seed` decides the order of runs.
TuneRow tune(const TunedProblem& tuned, Track& track, std::uint32_t seed, cuda::Tuning& tuning,
             const RaceRules& rules = {});

/// How long one of `left` problems may take of what is left of a command's time.
double share_of_time(double seconds_left, std::size_t left);

}  // namespace fovea::tools
