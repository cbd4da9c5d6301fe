// How coarse the tables are that a mask selects pieces of the score matrix by.
#include "expr/position_steps.hpp"

#include <gtest/gtest.h>

#include <string>

#include "expr/parse.hpp"
#include "expr/passes.hpp"
#include "formula_test_data.hpp"

namespace fovea::expr {
namespace {

/// "64 x 32": of queries and keys; as written, and simplified, which must say the same.
std::string steps_of(const std::string& mask) {
  Captures captures = testing::some_captures();
  captures.tensors.push_back({"sel", testing::shape_only(Dtype::boolean, {8, 100, 100})});
  captures.tensors.push_back({"flat", testing::shape_only(Dtype::i32, {10000})});
  const NodePtr node = parse(mask, captures, "mask");
  const PositionSteps steps = position_steps(*node);
  EXPECT_EQ(position_steps(*simplify(node)), steps) << mask;
  return std::to_string(steps.q) + " x " + std::to_string(steps.kv);
}

TEST(PositionSteps, AreWhatPositionsAreDividedBy) {
  EXPECT_EQ(steps_of("sel[q_head, q_idx // 64, kv_idx // 32]"), "64 x 32");
  EXPECT_EQ(steps_of("sel[0, kv_idx // 64, q_idx // 32]"), "32 x 64");
  EXPECT_EQ(steps_of("sel[q_head, q_idx >> 6, kv_idx >> 7]"), "64 x 128");
  EXPECT_EQ(steps_of("sel[q_head, q_idx // 8 // 6, (kv_idx >> 2) // 5]"), "48 x 20");
  EXPECT_EQ(steps_of("sel[q_head, q_idx, kv_idx // 64]"), "1 x 64");
  EXPECT_EQ(steps_of("flat[q_idx // 64 * 100 + min(kv_idx // 64, 99)] != 0"), "64 x 64");
  EXPECT_EQ(steps_of("(flat[q_idx // 64 * 4 + kv_idx // 64 // 32] >> kv_idx // 64 % 32 & 1) == 1"),
            "64 x 2048");
}

TEST(PositionSteps, AreThoseOfAllTablesTogether) {
  EXPECT_EQ(steps_of("sel[0, q_idx // 64, kv_idx // 64] && !sel[1, q_idx // 96, kv_idx // 128]"),
            "32 x 64");
  EXPECT_EQ(steps_of("sel[flat[q_idx // 32], q_idx // 64, kv_idx // 64]"), "32 x 64");
}

// Intervals decide comparisons, and what a row or a key alone reads.
TEST(PositionSteps, OtherPartsOfAMaskCountForNothing) {
  EXPECT_EQ(steps_of("kv_idx <= q_idx && sel[0, q_idx // 64, kv_idx // 64]"), "64 x 64");
  EXPECT_EQ(steps_of("doc[batch, q_idx] == doc[batch, kv_idx] && "
                     "(kv_idx % 7 == 0 || sel[0, q_idx // 64, kv_idx // 64])"),
            "64 x 64");
}

TEST(PositionSteps, WithoutTablesOfBothThereAreNone) {
  for (const char* mask :
       {"true", "kv_idx <= q_idx", "doc[batch, q_idx] == doc[batch, kv_idx]",
        "flags[q_idx // 64] && flags[kv_idx // 64]", "q_idx // 64 == kv_idx // 64"})
    EXPECT_EQ(steps_of(mask), "1 x 1") << mask;
}

TEST(MaskSteps, AreThoseOfAllThatAMaskReads) {
  const auto steps_of_all = [](const char* mask) {
    Captures captures = testing::some_captures();
    captures.tensors.push_back({"sel", testing::shape_only(Dtype::boolean, {8, 100, 100})});
    const PositionSteps steps = mask_steps(*parse(mask, captures, "mask"));
    return std::to_string(steps.q) + " x " + std::to_string(steps.kv);
  };
  EXPECT_EQ(steps_of_all("sel[q_head, q_idx // 64, kv_idx // 32]"), "64 x 32");
  EXPECT_EQ(steps_of_all("sel[0, q_idx // 64, kv_idx // 32] && kv_idx <= q_idx"), "1 x 1");
  EXPECT_EQ(steps_of_all("sel[0, q_idx // 64, kv_idx // 32] || kv_idx // 16 == 0"), "64 x 16");
  EXPECT_EQ(steps_of_all("q_idx // 64 == 0"), "64 x 0");
  EXPECT_EQ(steps_of_all("true"), "0 x 0");
}

// A sum divided steps elsewhere than at multiples; a run-time scalar is not known when a kernel is chosen.
TEST(PositionSteps, AreNotGuessed) {
  for (const char* index :
       {"(q_idx + seqlen_kv - seqlen_q) // 64", "(q_idx + 32) // 64", "q_idx // n",
        "q_idx // 64 + q_idx % 64", "q_idx // (0 - 64)", "-q_idx // 64", "q_idx >> 40"}) {
    EXPECT_EQ(steps_of(std::string("sel[0, ") + index + ", kv_idx // 64]"), "1 x 64") << index;
  }
  EXPECT_EQ(steps_of("sel[0, q_idx // 65536 // 65536, kv_idx // 64]"), "65536 x 64");
}

}  // namespace
}  // namespace fovea::expr
