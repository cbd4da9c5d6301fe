#include "parallel/deal_chunks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace fovea::parallel {
namespace {

using ::testing::DoubleEq;
using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;

using Works = std::vector<std::int64_t>;

Works sums_of(const Works& works, const std::vector<int>& group_of, Works base) {
  for (std::size_t i = 0; i < works.size(); ++i)
    base[static_cast<std::size_t>(group_of[i])] += works[i];
  return base;
}

Works counts_of(const std::vector<int>& group_of, std::size_t num_groups) {
  return sums_of(Works(group_of.size(), 1), group_of, Works(num_groups));
}

TEST(DealChunks, ZigzagPairsFirstAndLast) {
  EXPECT_THAT(deal_zigzag(3), ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(deal_zigzag(1), ElementsAre(0, 0));
}

TEST(DealChunks, BalancedFindsTheEvenDealThatGreedyMisses) {
  // Largest first to the least loaded gives 14 and 10; 12 and 12 exists with three chunks each.
  const Works works = {7, 4, 4, 4, 3, 2}, base = {0, 0};
  const std::vector<int> groups = deal_balanced({.works = works, .base = base});
  EXPECT_THAT(sums_of(works, groups, base), Each(12));
  EXPECT_THAT(counts_of(groups, 2), Each(3));
}

TEST(DealChunks, BaseWorkIsCounted) {
  const Works works = {5, 5, 1, 1}, base = {8, 0};
  const std::vector<int> groups = deal_balanced({.works = works, .base = base});
  EXPECT_THAT(sums_of(works, groups, base), Each(10));
}

TEST(DealChunks, EveningOutStopsAtTheTolerance) {
  const Works works = {50, 51, 49, 52}, base = {0, 0};
  const std::vector<int> neighbours = {0, 0, 1, 1};
  EXPECT_EQ(deal_contiguous({.works = works, .base = base}), neighbours);
  EXPECT_EQ(even_out({.works = works, .base = base, .tolerance = 0.02}, neighbours), neighbours);
  EXPECT_THAT(unevenness({.works = works, .base = base}, neighbours), DoubleEq(0));
  const Works uneven = {90, 10, 5, 5};
  EXPECT_THAT(unevenness({.works = uneven, .base = base}, neighbours),
              DoubleNear(100 / 55.0 - 1, 1e-12));
  const std::vector<int> evened =
      even_out({.works = uneven, .base = base, .tolerance = 0.02}, neighbours);
  EXPECT_THAT(sums_of(uneven, evened, base), ElementsAre(95, 15));
}

TEST(DealChunks, EveningOutTakesWhatIsReceivedLeast) {
  // Either of the chunks of 6 for either of those of 2 is even. Chunk 2 sees 0 alone, 3 the second group's.
  const Works works = {5, 6, 6, 2, 2, 5}, base = {0, 0};
  const std::vector<int> neighbours = {0, 0, 0, 1, 1, 1};
  std::vector<std::vector<std::size_t>> seen = {{0}, {0, 1}, {2, 3}, {3}, {0, 4}, {5}};
  Chunks chunks{.works = works, .base = base, .seen = seen};
  EXPECT_THAT(even_out(chunks, neighbours), ElementsAre(0, 0, 1, 1, 0, 1));
  std::swap(seen[1], seen[2]);  // 1 sees itself no more, and 2 nothing of the second group
  seen[1] = {1, 3};
  seen[2] = {0, 2};
  EXPECT_THAT(even_out(chunks, neighbours), ElementsAre(0, 1, 0, 1, 0, 1));
}

TEST(DealChunks, EveryDealHasEqualCountsAndIsNeverWorseThanItsBound) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    const std::size_t num_groups = 1 + random() % 9, per_group = 1 + random() % 12;
    Works works(num_groups * per_group), base(num_groups);
    for (std::int64_t& work : works) work = static_cast<std::int64_t>(random() % 1000);
    const Chunks chunks{.works = works, .base = base};
    for (const std::vector<int>& groups :
         {deal_balanced(chunks), even_out(chunks, deal_contiguous(chunks))}) {
      ASSERT_THAT(counts_of(groups, num_groups), Each(static_cast<std::int64_t>(per_group)));
      // An exchange helps whenever two groups are further apart than their most different chunks, so no deal stays
      // further from the mean than the heaviest chunk.
      const Works sums = sums_of(works, groups, base);
      const std::int64_t total = std::reduce(works.begin(), works.end());
      const std::int64_t mean = total / static_cast<std::int64_t>(num_groups);
      ASSERT_LE(std::ranges::max(sums), mean + std::ranges::max(works) + 1);
    }
  }
}

TEST(DealChunks, SameWorksGiveTheSameDeal) {
  const Works works = {3, 3, 3, 3, 3, 3, 2, 2}, base = {0, 0};
  EXPECT_EQ(deal_balanced({.works = works, .base = base}),
            deal_balanced({.works = works, .base = base}));
}

}  // namespace
}  // namespace fovea::parallel
