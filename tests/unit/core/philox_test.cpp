#include "core/philox.hpp"

#include <gtest/gtest.h>

#include <set>

namespace fovea::philox {
namespace {

// Known answers of Philox4x32-10, published with the generator (Random123, kat_vectors).
TEST(Philox, GivesThePublishedNumbers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  constexpr std::uint32_t kOnes = 0xffffffffU;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
  EXPECT_EQ(
      philox4x32({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}, {0xa4093822U, 0x299f31d0U}),
      (Counter{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}));
}

TEST(Philox, EveryCoordinateChangesTheWord) {
  const Key key = dropout_key(7, 3);
  const std::set<std::uint32_t> words = {
      random_word(key, 0, 0, 0, 0),
      random_word(key, 1, 0, 0, 0),
      random_word(key, 0, 1, 0, 0),
      random_word(key, 0, 0, 1, 0),
      random_word(key, 0, 0, 0, 1),  // another word of one counter
      random_word(key, 0, 0, 0, 4),  // another counter
      random_word(dropout_key(8, 3), 0, 0, 0, 0),
      random_word(dropout_key(7, 4), 0, 0, 0, 0),
      random_word(dropout_key(7ULL | 1ULL << 40U, 3), 0, 0, 0, 0),
      random_word(dropout_key(7, 3ULL | 1ULL << 40U), 0, 0, 0, 0),
  };
  EXPECT_EQ(words.size(), 10U);
}

TEST(Philox, ThresholdDropsNothingAtZeroAndAllAtOne) {
  EXPECT_EQ(drop_threshold(0), 0U);
  EXPECT_EQ(drop_threshold(1), 1ULL << 32U);
  EXPECT_EQ(drop_threshold(0.25F), 1ULL << 30U);
}

TEST(Philox, DropsTheShareThatWasAskedFor) {
  // 40,000 decisions at p = 0.3: the standard deviation of the count is 92, six of them are 550.
  const Key key = dropout_key(1, 0);
  const std::uint64_t threshold = drop_threshold(0.3F);
  int dropped = 0;
  for (std::int64_t q = 0; q < 200; ++q) {
    for (std::int64_t kv = 0; kv < 200; ++kv) dropped += random_word(key, 0, 0, q, kv) < threshold;
  }
  EXPECT_NEAR(dropped, 12000, 550);
}

}  // namespace
}  // namespace fovea::philox
