// What kernels need not evaluate key by key: the keys that a mask shows, and what a program adds to the score along
// them.
#include "expr/kv_limits.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "expr/kv_affine.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"
#include "expr/visible_score.hpp"
#include "formula_test_data.hpp"

namespace fovea::expr {
namespace {

NodePtr parsed(const std::string& text) { return parse(text, testing::some_captures(), "formula"); }

std::string shown(const NodePtr& node) { return node == nullptr ? "open" : print(*node); }

/// "first, last".
std::string limits_of(const std::string& mask) {
  const auto limits = kv_limits(parsed(mask));
  return limits ? shown(limits->first) + ", " + shown(limits->last) : "none";
}

TEST(KvLimits, AreThoseOfEveryComparison) {
  for (const auto& [mask, limits] : {std::pair<std::string, std::string>{"kv_idx >= 3", "3, open"},
                                     {"kv_idx > 3", "4, open"},
                                     {"kv_idx <= 3", "open, 3"},
                                     {"kv_idx < 3", "open, 2"},
                                     {"kv_idx == 3", "3, 3"},
                                     {"3 < kv_idx", "4, open"},
                                     {"3 > kv_idx", "open, 2"},
                                     {"kv_idx <= q_idx", "open, q_idx"},
                                     {"kv_idx - q_idx <= 3", "open, q_idx + 3"},
                                     {"q_idx - kv_idx <= 3", "q_idx - 3, open"},
                                     {"kv_idx >= 2 && kv_idx < 5", "2, 4"}}) {
    EXPECT_EQ(limits_of(mask), limits) << mask;
  }
}

TEST(KvLimits, OtherFormsHaveNone) {
  for (const char* mask : {"kv_idx != 3", "kv_idx < 3 || kv_idx > 5", "kv_idx % 2 == 0", "true"})
    EXPECT_EQ(limits_of(mask), "none") << mask;
}

TEST(ScoreSlope, IsWhatAKeyAddsMoreThanTheKeyBefore) {
  for (const auto& [score, slope] :
       {std::pair<std::string, std::string>{"score + float(kv_idx - q_idx)", "1.0"},
        {"score + float(q_idx - kv_idx)", "-1.0"},
        {"score - float(kv_idx + kv_idx) * 0.5", "-1.0"},
        {"score + float(q_idx)", "0.0"},
        {"score * score", "open"},
        {"score + slopes[q_head] * float(kv_idx - q_idx)", "slopes[q_head]"},
        {"score + float(kv_idx) + 3", "1.0"},
        // What may be the lowest float.
        {"score + float(kv_idx) - 3.4e38", "open"},
        {"score + float(kv_idx) + slopes[q_head]", "open"},
        {"score + float(kv_idx) - 2.0 * slopes[q_head]", "open"},
        {"score + float(kv_idx) + select(q_idx < 3, slopes[q_head], 0.0)", "open"},
        {"score + (slopes[q_head] + float(kv_idx))", "open"}}) {
    EXPECT_EQ(shown(score_slope(parsed(score))), slope) << score;
  }
}

TEST(ScoreLine, IsBentWhereADistanceIsZero) {
  struct Bent {
    std::string score, slope, bend, slope_behind;
  };
  for (const Bent& expected :
       {Bent{"score - slopes[q_head] * float(abs(q_idx - kv_idx))", "slopes[q_head]",
             "kv_idx + (q_idx - kv_idx)", "-slopes[q_head]"},
        Bent{"score + abs(float(kv_idx - 3)) * 2.0", "-2.0", "kv_idx - (kv_idx - 3)", "2.0"},
        Bent{"score + abs(float(kv_idx - 3)) + float(kv_idx)", "0.0", "kv_idx - (kv_idx - 3)",
             "2.0"}}) {
    const std::optional<ScoreLine> line = score_line(parsed(expected.score));
    ASSERT_TRUE(line.has_value()) << expected.score;
    EXPECT_EQ(shown(line->slope), expected.slope);
    EXPECT_EQ(shown(line->bend), expected.bend);
    EXPECT_EQ(shown(line->slope_behind), expected.slope_behind);
    EXPECT_EQ(score_slope(parsed(expected.score)), nullptr) << "it is not straight";
  }
}

std::string shown_where_visible(const std::string& score, const std::string& mask) {
  return shown(score_where_visible(parsed(score), parsed(mask)));
}

TEST(VisibleScore, HasSignsWhereDistancesHaveOne) {
  const std::string distance = "score - abs(q_idx - kv_idx)";
  EXPECT_EQ(shown_where_visible(distance, "kv_idx <= q_idx"), "score - (q_idx - kv_idx)");
  EXPECT_EQ(shown_where_visible("score - abs(kv_idx - q_idx)", "q_idx >= kv_idx"),
            "score - -(kv_idx - q_idx)");
  EXPECT_EQ(shown_where_visible(distance, "kv_idx >= q_idx"), "score - -(q_idx - kv_idx)");
  EXPECT_EQ(shown_where_visible("score - abs(float(q_idx - kv_idx))",
                                "kv_idx <= q_idx && q_idx - kv_idx <= 9 && q_head != 3"),
            "score - (q_idx - kv_idx)");
}

TEST(VisibleScore, KeepsDistancesToBothSides) {
  const std::string distance = "score - abs(q_idx - kv_idx)";
  for (const char* mask : {"true", "kv_idx < q_idx + 2", "kv_idx <= q_idx || kv_idx < 7",
                           "kv_idx <= q_idx + 1", "q_idx - kv_idx <= 9"})
    EXPECT_EQ(shown_where_visible(distance, mask), distance) << mask;
}

TEST(ScoreLine, IsBentOnceByWholeKeys) {
  for (const char* score :
       {"score + abs(float(kv_idx - 3)) + abs(float(kv_idx - 4))",
        "score + abs(float(kv_idx + kv_idx - q_idx))", "score + abs(float(kv_idx) * 0.5)",
        "score + abs(score + float(kv_idx))", "score + abs(float(kv_idx % 7 - 3))"}) {
    EXPECT_FALSE(score_line(parsed(score)).has_value()) << score;
  }
  EXPECT_TRUE(score_line(parsed("score + abs(float(kv_idx - 3)) - 3.0 * abs(float(kv_idx - 3))")))
      << "two distances from one key";
}

}  // namespace
}  // namespace fovea::expr
