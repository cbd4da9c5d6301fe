// Races by a made-up clock: who wins, who may not run, and what noise and time limits do.
#include "race.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace fovea::tools {
namespace {

/// Contenders that take so long, give or take normal noise relative to that.
struct MadeUpTrack : Track {
  std::vector<double> true_seconds;
  double noise = 0;
  std::mt19937 random{1};
  std::map<std::size_t, std::string> out;
  int runs_left = 1'000'000;
  std::vector<std::size_t> order{};

  explicit MadeUpTrack(std::vector<double> seconds) : true_seconds(std::move(seconds)) {}

  std::string why_out(std::size_t contender) override {
    return out.contains(contender) ? out[contender] : "";
  }
  double seconds(std::size_t contender) override {
    --runs_left;
    order.push_back(contender);
    std::normal_distribution<double> draw(1, noise);
    return true_seconds[contender] * std::max(0.5, draw(random));
  }
  bool is_over() override { return runs_left <= 0; }
};

Verdict run(MadeUpTrack& track, std::uint32_t seed = 1) {
  return race(track.true_seconds.size(), track, seed);
}

TEST(Race, FastestWins) {
  MadeUpTrack track({10, 12, 9, 11});
  track.noise = 0.005;
  const Verdict verdict = run(track);
  EXPECT_TRUE(verdict.is_decided);
  EXPECT_EQ(verdict.winner, 2U);
  EXPECT_NEAR(verdict.seconds, 9, 0.1);
  EXPECT_NEAR(verdict.default_seconds, 10, 0.1);
}

TEST(Race, LessThanTheMarginKeepsTheDefault) {
  MadeUpTrack track({10, 9.85});
  const Verdict verdict = run(track);
  EXPECT_TRUE(verdict.is_decided);
  EXPECT_EQ(verdict.winner, 0U);
  EXPECT_EQ(verdict.seconds, verdict.default_seconds);
}

TEST(Race, ExactlyTheMarginWins) {
  MadeUpTrack track({100, 98});
  EXPECT_EQ(run(track).winner, 1U);
}

// Twenty equal kernels on a clock that is off by 5 %: the best of the heats was lucky, and the finals say so.
TEST(Race, NoiseSeldomBeatsTheDefault) {
  int wrong = 0;
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    MadeUpTrack track(std::vector<double>(20, 1.0));
    track.noise = 0.05;
    track.random.seed(seed);
    wrong += run(track, seed).winner != 0 ? 1 : 0;
  }
  EXPECT_LE(wrong, 12);
}

TEST(Race, AGainBeyondTheNoiseIsFoundWhateverTheOrder) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    MadeUpTrack track({1.0, 1.03, 0.93, 1.01});
    track.noise = 0.01;
    track.random.seed(seed);
    EXPECT_EQ(run(track, seed).winner, 2U) << seed;
  }
}

TEST(Race, WrongKernelNeverRuns) {
  MadeUpTrack track({10, 1, 9});
  track.out[1] = "out differs";
  const Verdict verdict = run(track);
  EXPECT_EQ(verdict.winner, 2U);
  ASSERT_EQ(verdict.out.size(), 1U);
  EXPECT_EQ(verdict.out[0].contender, 1U);
  EXPECT_EQ(verdict.out[0].reason, "out differs");
  EXPECT_EQ(std::ranges::count(track.order, 1U), 0);
}

TEST(Race, NothingIsDecidedWithoutTheDefault) {
  MadeUpTrack track({10, 1});
  track.out[0] = "does not compile";
  const Verdict verdict = run(track);
  EXPECT_FALSE(verdict.is_decided);
  EXPECT_EQ(verdict.winner, 0U);
  EXPECT_TRUE(track.order.empty());
}

TEST(Race, HopelessContendersRunOnce) {
  MadeUpTrack track({10, 500, 9});
  EXPECT_EQ(run(track).winner, 2U);
  EXPECT_EQ(std::ranges::count(track.order, 1U), 1);
}

TEST(Race, ADefaultThatIsHopelessStaysToBeBeaten) {
  MadeUpTrack track({500, 10});
  EXPECT_EQ(run(track).winner, 1U);
}

// Whenever time is up, nothing is decided, and no run starts after it.
TEST(Race, TimeThatIsUpDecidesNothing) {
  MadeUpTrack whole({10, 9, 11});
  ASSERT_TRUE(run(whole).is_decided);
  const int needed = static_cast<int>(whole.order.size());
  for (int runs = 0; runs < needed; ++runs) {
    MadeUpTrack track({10, 9, 11});
    track.runs_left = runs;
    EXPECT_FALSE(run(track).is_decided) << runs;
    EXPECT_EQ(track.order.size(), static_cast<std::size_t>(runs));
  }
}

TEST(Race, OneContenderIsTimedAlone) {
  MadeUpTrack track({10});
  const Verdict verdict = run(track);
  EXPECT_TRUE(verdict.is_decided);
  EXPECT_EQ(verdict.winner, 0U);
  EXPECT_EQ(verdict.default_seconds, 10);
}

TEST(Race, EqualSeedsGiveEqualOrders) {
  MadeUpTrack a({10, 9, 11}), b({10, 9, 11}), c({10, 9, 11});
  run(a, 5), run(b, 5), run(c, 6);
  EXPECT_EQ(a.order, b.order);
  EXPECT_NE(a.order, c.order);
}

}  // namespace
}  // namespace fovea::tools
