#include "mask/range_table.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "mask/element_range.hpp"

namespace fovea::mask {
namespace {

using Index = std::array<std::int64_t, kMaxRank>;

std::vector<std::int32_t> random_ints(std::size_t count) {
  std::mt19937 random(7);
  std::uniform_int_distribution<std::int32_t> any(-1000, 1000);
  std::vector<std::int32_t> result(count);
  std::ranges::generate(result, [&] { return any(random); });
  return result;
}

/// All [first, last] of one line against a plain scan; element(i) is the line's i-th element.
void expect_exact(const RangeTable& table, const Index& others, std::int64_t extent,
                  auto&& element) {
  for (std::int64_t first = 0; first < extent; ++first) {
    double lo = std::numeric_limits<double>::infinity();
    double hi = -lo;
    for (std::int64_t last = first; last < extent; ++last) {
      lo = std::min(lo, static_cast<double>(element(last)));
      hi = std::max(hi, static_cast<double>(element(last)));
      const expr::Interval range = table.range(others, first, last);
      ASSERT_EQ(range.lo, lo) << first << ".." << last << " of " << extent;
      ASSERT_EQ(range.hi, hi) << first << ".." << last << " of " << extent;
    }
  }
}

TEST(RangeTable, EveryRunEqualsAScan) {
  // Around one segment of 32, around 8 segments, and a prime that fills three levels.
  for (const std::int64_t extent : {1, 31, 32, 33, 255, 256, 257, 2311}) {
    const std::vector<std::int32_t> data = random_ints(static_cast<std::size_t>(extent));
    const RangeTable table(view(data.data(), {extent}), 0);
    expect_exact(table, {}, extent,
                 [&](std::int64_t i) { return data[static_cast<std::size_t>(i)]; });
  }
}

TEST(RangeTable, MiddleDimensionsAndStrangeStridesAreRight) {
  // [3, 70, 2] with the middle dimension reversed and the last one broadcast.
  const std::vector<std::int32_t> data = random_ints(3 * 70);
  const TensorView reversed = view(data.data() + 69, {3, 70, 2}, {70, -1, 0});
  const RangeTable table(reversed, 1);
  for (std::int64_t i = 0; i < 3; ++i) {
    for (std::int64_t k = 0; k < 2; ++k) {
      expect_exact(table, {i, 0, k}, 70,
                   [&](std::int64_t j) { return data[static_cast<std::size_t>(i * 70 + 69 - j)]; });
    }
  }
}

TEST(RangeTable, BroadcastDimensionHasOneElement) {
  const std::int32_t value = 42;
  const RangeTable table(view(&value, {1000000000}, {0}), 0);
  EXPECT_EQ(table.range({}, 5, 999999999), expr::Interval::point(42));
}

TEST(ElementRange, WideIntsAreSaturated) {
  const std::int64_t data[] = {std::int64_t{1} << 40, 3, -(std::int64_t{1} << 50)};
  const expr::Interval range = range_of_elements(view(data, {3}), {.count = 3});
  EXPECT_EQ(range.lo, -2147483648.0);
  EXPECT_EQ(range.hi, 2147483647.0);
}

TEST(ElementRange, NanIsReportedBesideTheBounds) {
  const float data[] = {1, std::nanf(""), -2};
  const expr::Interval range = range_of_elements(view(data, {3}), {.count = 3});
  EXPECT_EQ(range, (expr::Interval{.lo = -2, .hi = 1, .may_be_nan = true}));
  EXPECT_TRUE(range_of_elements(view(data, {3}), {.offset = 1, .count = 1}).may_be_nan);
}

TEST(ElementRange, EveryDtypeIsRead) {
  const float16 half[] = {float16(-1.5F), float16(2.0F)};
  const bfloat16 brain[] = {bfloat16(-1.5F), bfloat16(2.0F)};
  const std::int8_t bytes[] = {-3, 5};
  const std::uint8_t unsigned_bytes[] = {200, 5};
  const bool bools[] = {true, false};
  const ElementSpan both{.count = 2};
  EXPECT_EQ(range_of_elements(view(half, {2}), both), (expr::Interval{.lo = -1.5, .hi = 2}));
  EXPECT_EQ(range_of_elements(view(brain, {2}), both), (expr::Interval{.lo = -1.5, .hi = 2}));
  EXPECT_EQ(range_of_elements(view(bytes, {2}), both), (expr::Interval{.lo = -3, .hi = 5}));
  EXPECT_EQ(range_of_elements(view(unsigned_bytes, {2}), both),
            (expr::Interval{.lo = 5, .hi = 200}));
  EXPECT_EQ(range_of_elements(view(bools, {2}), both), (expr::Interval{.lo = 0, .hi = 1}));
}

}  // namespace
}  // namespace fovea::mask
