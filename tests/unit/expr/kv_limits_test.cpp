// What kernels need not evaluate key by key: the keys that a mask shows, and what a program adds to the score along
// them.
#include "expr/kv_limits.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "expr/kv_affine.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"
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

}  // namespace
}  // namespace fovea::expr
