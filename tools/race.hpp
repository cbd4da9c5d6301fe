// Which of several kernels is fastest, by a clock that is given: a GPU's, or a test's. Contender 0 stands unless
// another is faster beyond doubt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fovea::tools {

/// What contenders run on.
class Track {
 public:
  virtual ~Track() = default;
  /// Why this contender may not run: its results are wrong, it does not compile. Empty: it may. Contender 0 is asked
  /// first.
  virtual std::string why_out(std::size_t contender) = 0;
  /// One run of it.
  virtual double seconds(std::size_t contender) = 0;
  /// Time is up: asked before each of the above.
  virtual bool is_over() = 0;
};

/// A round runs every contender that is left, in an order that is drawn anew: what the GPU's clock does, it does to all
/// of them. After `heats` rounds the one with the best median meets contender 0 in `finals` rounds of their own, since
/// the best of many is lucky too.
struct RaceRules {
  std::size_t heats = 5, finals = 21;
  double hopeless = 2;   // after the first round, those that took so many times the best are out
  double margin = 0.02;  // the winner's median is below contender 0's by at least this
  double share_of_wins =
      0.7;  // and it was faster in so many of the final rounds: at 21 rounds, luck in 1 of 25 even races
};

struct Verdict {
  struct Out {
    std::size_t contender = 0;
    std::string reason;
  };
  // false: time was up, or contender 0 may not run; nothing below but `out` counts
  bool is_decided = false;
  std::size_t winner = 0;      // 0: the table's choice stands
  double seconds = 0;          // of the winner, its median of the finals
  double default_seconds = 0;  // of contender 0
  std::vector<Out> out;
};

/// `seed` decides the order of runs.
Verdict race(std::size_t num_contenders, Track& track, std::uint32_t seed,
             const RaceRules& rules = {});

}  // namespace fovea::tools
