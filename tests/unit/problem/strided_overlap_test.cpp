// Strided tensors that share a byte, and those that only reach into each other. tests/property has the random ones.
#include "problem/strided_overlap.hpp"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <limits>
#include <vector>

#include "unit/problem/problems.hpp"

namespace fovea::testing {
namespace {

alignas(64) std::array<float, 4096> memory{};

TensorView at(std::int64_t offset, const std::vector<std::int64_t>& shape,
              const std::vector<std::int64_t>& strides = {}, Dtype dtype = Dtype::f32) {
  return {static_cast<const void*>(memory.data() + offset), spec_of(dtype, shape, strides)};
}

bool meet(const TensorView& a, const TensorView& b, int max_steps = 1 << 14) {
  EXPECT_EQ(may_share_bytes(a, b, max_steps), may_share_bytes(b, a, max_steps));
  return may_share_bytes(a, b, max_steps);
}

TEST(StridedOverlap, PartsOfAPackedBufferAreDisjoint) {
  constexpr std::int64_t kB = 2, kS = 5, kH = 3, kD = 8;
  const auto part = [](std::int64_t i) {
    return at(i * kH * kD, {kB, kS, kH, kD}, {kS * 3 * kH * kD, 3 * kH * kD, kD, 1});
  };
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) EXPECT_EQ(meet(part(i), part(j)), i == j);
  }
}

TEST(StridedOverlap, OneElementTooManyMeets) {
  const TensorView rows = at(0, {4, 8}, {16, 1});
  EXPECT_FALSE(meet(rows, at(8, {4, 8}, {16, 1})));
  EXPECT_TRUE(meet(rows, at(8, {4, 9}, {16, 1})));
  EXPECT_TRUE(meet(rows, at(7, {4, 8}, {16, 1})));
  EXPECT_FALSE(meet(rows, at(8, {3, 8}, {16, 1})));
  EXPECT_FALSE(meet(rows, at(56, {9}))) << "behind the last";
  EXPECT_TRUE(meet(rows, at(55, {9})));
}

TEST(StridedOverlap, StepsThatAreOutOfPhaseAreDisjoint) {
  EXPECT_FALSE(meet(at(0, {50}, {2}), at(1, {50}, {2})));
  EXPECT_FALSE(meet(at(0, {50}, {4}), at(2, {30}, {8})));
  EXPECT_TRUE(meet(at(0, {50}, {2}), at(1, {30}, {3})));
  EXPECT_FALSE(meet(at(0, {50}, {6}), at(2, {30}, {9}))) << "both are multiples of 3, 2 is not";
}

TEST(StridedOverlap, ReversedTensorsReachDown) {
  EXPECT_FALSE(meet(at(15, {8}, {-2}), at(0, {8}, {2})));
  EXPECT_TRUE(meet(at(14, {8}, {-2}), at(0, {8}, {2})));
  EXPECT_FALSE(meet(at(7, {8}, {-1}), at(8, {8})));
  EXPECT_TRUE(meet(at(8, {8}, {-1}), at(8, {8})));
  EXPECT_TRUE(meet(at(8, {8}, {-1}), at(0, {2})));
  EXPECT_FALSE(meet(at(9, {8}, {-1}), at(0, {2})));
}

TEST(StridedOverlap, RepeatedElementsAreOnePlace) {
  EXPECT_TRUE(meet(at(4, {100}, {0}), at(0, {8})));
  EXPECT_FALSE(meet(at(8, {100}, {0}), at(0, {8})));
  EXPECT_FALSE(meet(at(3, {7, 100}, {2, 0}), at(0, {8}, {2})));
}

TEST(StridedOverlap, ElementsOfOtherSizesMeetInPart) {
  const auto* bytes = reinterpret_cast<const std::byte*>(memory.data());
  const TensorView bytes_behind(static_cast<const void*>(bytes + 4), spec_of(Dtype::u8, {4}, {8}));
  const TensorView bytes_in(static_cast<const void*>(bytes + 3), spec_of(Dtype::u8, {4}, {8}));
  EXPECT_FALSE(meet(at(0, {4}, {2}), bytes_behind));
  EXPECT_TRUE(meet(at(0, {4}, {2}), bytes_in));
}

TEST(StridedOverlap, TensorsWithoutElementsMeetNothing) {
  EXPECT_FALSE(meet(at(0, {4, 0}), at(0, {4})));
  EXPECT_FALSE(meet(at(0, {0}), at(0, {0})));
  EXPECT_TRUE(meet(at(0, {}), at(0, {4}))) << "rank 0 is one element";
}

TEST(StridedOverlap, WhatWouldTakeTooLongIsTakenToMeet) {
  // No common divisor and no nesting: thousands of sums are to be tried before the answer is no.
  const TensorView a = at(0, {40, 40}, {62, 58}, Dtype::u8);
  const TensorView b = at(0, {40, 40}, {62, 58}, Dtype::u8);
  EXPECT_TRUE(meet(a, b));
  const TensorView far(
      static_cast<const void*>(reinterpret_cast<const std::byte*>(memory.data()) + 2001),
      spec_of(Dtype::u8, {30, 30}, {62, 58}));
  EXPECT_FALSE(meet(a, far, 1)) << "2001 is odd";
  EXPECT_TRUE(meet(a, far, 0)) << "no step is allowed";
}

TEST(StridedOverlap, ReachKnowsWhatOverflows) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  for (const std::int64_t stride : {kMost, kLeast, kLeast + 1, kMost / 4 + 1, kMost / 4,
                                    std::int64_t{1} << 61, std::int64_t{1} << 62})
    EXPECT_FALSE(byte_reach(spec_of(Dtype::f32, {1, 4, 2, 8}, {64, stride, 8, 1}))) << stride;
  EXPECT_FALSE(byte_reach(spec_of(Dtype::u8, {2, 2}, {1LL << 60, 1LL << 59})));
  EXPECT_TRUE(byte_reach(spec_of(Dtype::u8, {2, 2}, {1LL << 59, (1LL << 59) - 1})));
  EXPECT_TRUE(byte_reach(spec_of(Dtype::u8, {2, 2}, {1LL << 59, -(1LL << 59)})));
  EXPECT_TRUE(byte_reach(spec_of(Dtype::f32, {1, 2}, {kMost, 1}))) << "the only index is 0";
  EXPECT_TRUE(byte_reach(spec_of(Dtype::f32, {2, 0}, {kMost, 1}))) << "no elements";
  const auto reach = byte_reach(spec_of(Dtype::f16, {3, 4}, {-10, 2}));
  ASSERT_TRUE(reach);
  EXPECT_EQ(reach->low, -40);
  EXPECT_EQ(reach->high, 14);
}

}  // namespace
}  // namespace fovea::testing
