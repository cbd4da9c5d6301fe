#include "reference/merge_states.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/attention_forward.hpp"
#include "support/case.hpp"

namespace fovea::reference {
namespace {

using testing::Case;
using testing::CaseMemory;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// States of one row and head_dim 1.
struct State {
  float out = 0, lse = 0;
};
MergedState merged(const std::vector<State>& states) {
  const float like = 0;
  MergeStates args;
  for (const State& each : states) {
    args.outs.push_back(view(&each.out, {1, 1, 1, 1}));
    args.lses.push_back(view(&each.lse, {1, 1, 1}));
  }
  args.out = view(&like, {1, 1, 1, 1});
  return reference::merge_states(args);
}

TEST(ReferenceMerge, StatesWeighAsTheirDenominators) {
  const MergedState got = merged({{.out = 4, .lse = 0}, {.out = 8, .lse = std::log(3.F)}});
  EXPECT_NEAR(got.out[0], 7, 1e-6);
  EXPECT_NEAR(got.lse[0], std::log(4), 1e-6);
}

TEST(ReferenceMerge, StatesThatSawNothingChangeNothing) {
  const MergedState got = merged({{kNaN, -kInfinity}, {5, 2}, {kInfinity, -kInfinity}});
  EXPECT_EQ(got.out[0], 5);
  EXPECT_EQ(got.lse[0], 2);
}

TEST(ReferenceMerge, NothingMergesToTheEmptyState) {
  for (const MergedState& got : {merged({}), merged({{kNaN, -kInfinity}})}) {
    EXPECT_EQ(got.out[0], 0);
    EXPECT_EQ(got.lse[0], -static_cast<double>(kInfinity));
  }
}

TEST(ReferenceMerge, InfinityOutlivesAWeightThatRoundsToZero) {
  EXPECT_EQ(merged({{kInfinity, -3000}, {3, 0}}).out[0], kInfinity);
  EXPECT_EQ(merged({{3, 0}, {-kInfinity, -3000}}).out[0], -static_cast<double>(kInfinity));
  EXPECT_TRUE(std::isnan(merged({{3, 0}, {kNaN, -3000}}).out[0]));
}

TEST(ReferenceMerge, AStateOfLsePlusInfinityTakesAllTheWeight) {
  const MergedState got = merged({{1, 2}, {3, kInfinity}});
  EXPECT_EQ(got.out[0], 3);
  EXPECT_EQ(got.lse[0], static_cast<double>(kInfinity));
}

TEST(ReferenceMerge, LargeExponentsDoNotOverflow) {
  const MergedState got = merged({{1, 3e4F}, {3, 3e4F}, {9, -3e4F}});
  EXPECT_NEAR(got.out[0], 2, 1e-9);
  EXPECT_NEAR(got.lse[0], 3e4 + std::log(2), 1e-9);
}

/// Keys 0..4 and 5..10 of a problem, each attended alone in fp32, merge to the whole.
TEST(ReferenceMerge, PartsOfTheKeysMergeToTheWhole) {
  Case problem{.label = "whole",
               .batch = 2,
               .seqlen_q = 3,
               .seqlen_kv = 11,
               .num_heads_q = 2,
               .head_dim_v = 5};
  CaseMemory memory(problem);
  const ForwardResult whole = reference::attention_forward(memory.args());
  MergeStates args;
  std::vector<std::vector<float>> stored;
  stored.reserve(4);  // views point into it
  for (const bool is_first : {true, false}) {
    AttentionForward part = memory.args();
    part.mask = mask_mod([&](auto x) { return is_first ? x.kv_idx < 5 : x.kv_idx >= 5; });
    const ForwardResult result = reference::attention_forward(part);
    stored.emplace_back(result.out.begin(), result.out.end());
    args.outs.push_back(view(stored.back().data(), {2, 3, 2, 5}));
    stored.emplace_back(result.lse.begin(), result.lse.end());
    args.lses.push_back(view(stored.back().data(), {2, 2, 3}));
  }
  args.out = args.outs[0];
  const MergedState got = reference::merge_states(args);
  for (std::size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(got.out[i], whole.out[i], 1e-6);
  for (std::size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(got.lse[i], whole.lse[i], 1e-6);
}

}  // namespace
}  // namespace fovea::reference
