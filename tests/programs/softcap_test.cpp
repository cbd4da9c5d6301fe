// Hopper's cap of scores beside fp64, with approximations that err by all that the PTX ISA allows; and which formulas
// are caps.
#include "sm90/forward/softcap.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "fovea/mask.hpp"

#include "expr/print_cuda.hpp"

namespace fovea::cuda::sm90 {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNoBase[2] = {};

float capped(const Softcap& cap, float score, float neighbour = 0) {
  float s[4] = {score, neighbour, neighbour, neighbour};
  cap.apply(s, kNoBase);
  return s[0];
}

bool has_same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

/// visit(score) of either sign: evenly up to 12 caps, where tanh has long been 1, and by exponent.
template <typename Visit>
void for_scores(double cap, double scale, Visit visit) {
  std::mt19937 random(3);
  const double widest = std::fmin(12 * std::fabs(cap / scale), 1e37);
  for (int i = 0; i < 4000; ++i) {
    const double even = widest * std::uniform_real_distribution<double>(-1, 1)(random);
    visit(static_cast<float>(i % 2 == 0 ? even : even * std::exp2(-double(random() % 40))));
  }
}

TEST(Softcap, ErrsByWhatItStates) {
  // Caps that models have; those whose powers, with the scale's, leave the range of floats; the ends.
  for (const float cap : {30.0F, 50.0F, 1.0F, 0.01F, 1e4F, 1e12F, 1e-25F, 1e29F, -30.0F}) {
    for (const float scale : {0.08838835F, 1.0F, 1e-6F, -0.1F, 300.0F}) {
      const Softcap made = Softcap::of(cap, scale);
      double worst = 0;
      for_scores(cap, scale, [&](float score) {
        const double u = double{scale} * score / cap;
        const double exact = cap * std::tanh(u) / std::log(2.0);
        if (std::fabs(exact) < 0x1p-120) return;
        worst = std::fmax(worst, std::fabs(capped(made, score) / exact - 1));
      });
      EXPECT_LT(worst, 0x1.4p-21) << "cap " << cap << ", scale " << scale;
    }
  }
}

TEST(Softcap, BitsOfAScoreDoNotDependOnItsNeighbours) {
  for (const float cap : {30.0F, 1.0F, 1e12F}) {
    const Softcap made = Softcap::of(cap, 0.08838835F);
    for_scores(cap, 0.08838835, [&](float score) {
      const float alone = capped(made, score);
      for (const float neighbour : {1e30F, -kInf, std::nanf("")})
        ASSERT_TRUE(has_same_bits(alone, capped(made, score, neighbour))) << score;
    });
  }
}

TEST(Softcap, MeetsItsEnds) {
  const Softcap made = Softcap::of(30, 0.125F);
  const double most = 30 / std::log(2.0);
  EXPECT_NEAR(capped(made, kInf), most, most * 0x1p-22);
  EXPECT_NEAR(capped(made, -kInf), -most, most * 0x1p-22);
  EXPECT_NEAR(capped(made, 3e38F), most, most * 0x1p-22);
  EXPECT_EQ(capped(made, 0), 0);
  EXPECT_TRUE(std::isnan(capped(made, std::nanf(""))));
  EXPECT_TRUE(std::isnan(capped(Softcap::of(kInf, 0.125F), 1)));
}

TEST(Softcap, ComesLessTheBaseOfItsRow) {
  const Softcap made = Softcap::of(30, 1);
  for (const float score : {0.5F, -7.0F, 25.0F, -100.0F}) {
    float s[4] = {score, score, score, score};
    const float base[2] = {80, -40.5F};
    made.apply(s, base);
    const double exact = 30 * std::tanh(score / 30.0) / std::log(2.0);
    const double allowed = std::fabs(exact) * 0x1p-20 + 0x1p-18;  // and half an ulp of 80 and more
    EXPECT_NEAR(s[1], exact - 80, allowed);
    EXPECT_NEAR(s[2], exact + 40.5, allowed);
  }
}

// ---- formulas -----------------------------------------------------------------------------------

bool is_cap(const ScoreMod& score) {
  return expr::print_cuda(score, {}).mods.find("has_softcap = true") != std::string::npos;
}
bool is_cap(const char* formula) { return is_cap(parse_score_mod(formula, {})); }

TEST(CapOfScores, IsFoundInWordAndFormula) {
  EXPECT_TRUE(is_cap(softcap(50)));
  EXPECT_TRUE(is_cap("30 * tanh(score / 30)"));
  EXPECT_TRUE(is_cap("tanh(score / 2.5) * 2.5"));
}

TEST(CapOfScores, MayBeReadWhenTheCallRuns) {
  const float cap = 30;
  const std::int32_t whole = 30;
  const Captures captures{
      .tensors = {{"cap", view(&cap, {})}, {"whole", view(&whole, {})}, {"caps", view(&cap, {1})}}};
  EXPECT_TRUE(is_cap(parse_score_mod("cap * tanh(score / cap)", captures)));
  EXPECT_TRUE(is_cap(parse_score_mod("whole * tanh(score / whole)", captures)));
  EXPECT_FALSE(is_cap(parse_score_mod("caps[q_head] * tanh(score / caps[q_head])", captures)));
}

TEST(CapOfScores, IsNothingElse) {
  EXPECT_FALSE(is_cap(ScoreMod{}));
  EXPECT_FALSE(is_cap("30 * tanh(score / 20)"));
  EXPECT_FALSE(is_cap("30 * tanh(score)"));
  EXPECT_FALSE(is_cap("30 * tanh((score + 1) / 30)"));
  EXPECT_FALSE(is_cap("30 * tanh(score / 30) + float(kv_idx)"));
  EXPECT_FALSE(is_cap("float(q_head) * tanh(score / float(q_head))"));
}

}  // namespace
}  // namespace fovea::cuda::sm90
