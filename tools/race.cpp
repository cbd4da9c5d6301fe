#include "race.hpp"

#include <algorithm>
#include <random>

namespace fovea::tools {
namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Race {
 public:
  Race(Track& track, std::uint32_t seed, const RaceRules& rules)
      : track_(track), random_(seed), rules_(rules) {}

  Verdict run(std::size_t num_contenders) {
    if (!admit(num_contenders) || !run_heats()) return verdict_;
    const std::size_t best = fastest();
    if (best != 0) runners_ = {0, best};
    if (best == 0) runners_ = {0};
    verdict_.is_decided = run_rounds(rules_.finals);
    if (verdict_.is_decided) judge(best);
    return verdict_;
  }

 private:
  /// False: time is up, or there is nothing to compare with.
  bool admit(std::size_t num_contenders) {
    for (std::size_t i = 0; i < num_contenders; ++i) {
      if (track_.is_over()) return false;
      std::string reason = track_.why_out(i);
      if (reason.empty()) {
        runners_.push_back(i);
      } else {
        verdict_.out.push_back({i, std::move(reason)});
      }
      if (runners_.empty()) return false;
    }
    times_.resize(num_contenders);
    return num_contenders > 0;
  }

  /// The first round warms up and is forgotten, but for those that it shows to be hopeless.
  bool run_heats() {
    if (!run_rounds(1)) return false;
    const double best = median(times_[fastest()]);
    std::erase_if(runners_, [&](std::size_t i) {
      return i != 0 && median(times_[i]) > rules_.hopeless * best;
    });
    return run_rounds(rules_.heats);
  }

  /// Forgets what was measured before.
  bool run_rounds(std::size_t count) {
    for (std::vector<double>& times : times_) times.clear();
    for (std::size_t round = 0; round < count; ++round) {
      std::ranges::shuffle(runners_, random_);
      for (const std::size_t i : runners_) {
        if (track_.is_over()) return false;
        times_[i].push_back(track_.seconds(i));
      }
    }
    return true;
  }

  std::size_t fastest() const {
    return *std::ranges::min_element(
        runners_, {}, [&](std::size_t i) { return std::pair(median(times_[i]), i); });
  }

  void judge(std::size_t best) {
    verdict_.seconds = verdict_.default_seconds = median(times_[0]);
    if (best == 0) return;
    const double seconds = median(times_[best]);
    std::size_t wins = 0;
    for (std::size_t i = 0; i < rules_.finals; ++i) wins += times_[best][i] < times_[0][i] ? 1 : 0;
    const double needed = rules_.share_of_wins * static_cast<double>(rules_.finals);
    if (seconds > (1 - rules_.margin) * verdict_.default_seconds ||
        static_cast<double>(wins) < needed) {
      return;
    }
    verdict_.winner = best;
    verdict_.seconds = seconds;
  }

  Track& track_;
  std::minstd_rand random_;
  const RaceRules& rules_;
  std::vector<std::size_t> runners_;
  std::vector<std::vector<double>> times_;  // of each contender, round by round
  Verdict verdict_;
};

}  // namespace

Verdict race(std::size_t num_contenders, Track& track, std::uint32_t seed, const RaceRules& rules) {
  return Race(track, seed, rules).run(num_contenders);
}

}  // namespace fovea::tools
