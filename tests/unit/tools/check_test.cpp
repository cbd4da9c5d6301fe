#include "tools/check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace fovea::tools {
namespace {

/// One query and three keys whose attention is known: scores 0, so the mean of v.
class Check : public testing::Test {
 protected:
  AttentionForward args() {
    return {.q = view(q_.data(), {1, 1, 1, 2}),
            .k = view(k_.data(), {1, 3, 1, 2}),
            .v = view(v_.data(), {1, 3, 1, 1}),
            .out = view(out_.data(), {1, 1, 1, 1}),
            .lse = view(lse_.data(), {1, 1, 1})};
  }

  std::array<float, 2> q_{0, 0};
  std::array<float, 6> k_{1, 2, 3, 4, 5, 6};
  std::array<float, 3> v_{1, 2, 6};
  std::array<float, 1> out_{3};
  std::array<float, 1> lse_{std::log(3.0F)};
};

TEST_F(Check, TheRightResultPasses) {
  EXPECT_TRUE(check_forward(args(), ComputeDtype::f32).passes());
}

TEST_F(Check, AnErrorOfAThousandthFails) {
  out_[0] = 3.003F;
  const CheckResult result = check_forward(args(), ComputeDtype::f32);
  EXPECT_FALSE(result.out.passes());
  EXPECT_TRUE(result.lse.passes());
  EXPECT_EQ(result.out.num_wrong, 1);
  EXPECT_NEAR(result.out.max_error, 0.003, 1e-6);
  EXPECT_LT(result.out.allowed, 1e-5);
}

TEST_F(Check, TheLargestErrorStandsBesideWhatItIsAllowed) {
  // In f16 300 may be 0.125 off, 3 only 0.001: the second error is the larger part of its own.
  const std::array<float, 6> v{100, 1, 200, 2, 600.09F, 6.0027F};
  std::array<float16, 2> out{float16(300.F), float16(3.F)};
  AttentionForward call = args();
  call.v = view(v.data(), {1, 3, 1, 2});
  call.out = view(out.data(), {1, 1, 1, 2});
  const CheckResult result = check_forward(call, ComputeDtype::f32);
  EXPECT_TRUE(result.out.passes());
  EXPECT_NEAR(result.out.max_error, 0.03, 1e-4);
  EXPECT_LE(result.out.max_error, result.out.allowed);
}

TEST_F(Check, NanAndInfinityMustBeWhereTheyBelong) {
  lse_[0] = -INFINITY;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::f32).passes());
  out_[0] = NAN;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::f32).out.passes());
  v_[1] = NAN;
  EXPECT_TRUE(check_forward(args(), ComputeDtype::f32).out.passes());
}

TEST_F(Check, NanWhereTheOracleHasNumbersFailsThoughThePlainFormulaHasNanToo) {
  q_ = {1e30F, 1e30F};
  k_ = {1e10F, 1e10F, -1e10F, 1e10F, 1e10F, -1e10F};
  const CheckResult right = check_forward(args(), ComputeDtype::f32);
  EXPECT_EQ(right.lse.num_beyond_f32, 1);  // 1.4e40
  out_[0] = std::nanf("");
  lse_[0] = std::nanf("");
  const CheckResult result = check_forward(args(), ComputeDtype::f32);
  EXPECT_EQ(result.out.num_wrong, 1);
  EXPECT_EQ(result.lse.num_wrong, 1);
  EXPECT_FALSE(result.passes());
  EXPECT_GT(result.num_beyond_f32(), 0);
}

TEST_F(Check, ScoresOfNoDigitsAllowNoMoreThanTheRangeOfValues) {
  // Scores of some 1e30 are known to 1e23: any average of 1, 2 and 6 may be right, and nothing else.
  q_ = {1e30F, 1e30F};
  lse_[0] = static_cast<float>(11 / std::sqrt(2.0)) * 1e30F;
  for (const float out : {1.F, 2.F, 6.F}) {
    out_[0] = out;
    EXPECT_TRUE(check_forward(args(), ComputeDtype::f32).passes());
  }
  EXPECT_LE(check_forward(args(), ComputeDtype::f32).out.allowed, 12.001);
  out_[0] = 1e10F;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::f32).out.passes());
}

TEST_F(Check, InfinityHasTheSignOfWhatItStandsFor) {
  v_[1] = INFINITY;
  out_[0] = INFINITY;
  EXPECT_TRUE(check_forward(args(), ComputeDtype::f32).passes());
  out_[0] = -INFINITY;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::f32).passes());
  out_[0] = NAN;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::f32).passes());
}

TEST_F(Check, ANumberThatTheOutputCannotHoldIsInfinite) {
  v_ = {3e5F, 3e5F, 3e5F};
  AttentionForward call = args();
  for (const auto& [value, is_right] :
       {std::pair{INFINITY, true}, {-INFINITY, false}, {65504.F, false}, {NAN, false}}) {
    std::array<float16, 1> out{float16(value)};
    call.out = view(out.data(), {1, 1, 1, 1});
    EXPECT_EQ(check_forward(call, ComputeDtype::f32).passes(), is_right) << value;
  }
}

TEST_F(Check, DenormalValuesMayBeLostByBf16ProductsAlone) {
  v_ = {1e-39F, 1e-39F, 1e-39F};
  for (const float out : {0.F, 1e-39F}) {
    out_[0] = out;
    EXPECT_TRUE(check_forward(args(), ComputeDtype::bf16).passes());
    EXPECT_TRUE(check_forward(args(), {ComputeDtype::f32, true}).passes());
    EXPECT_EQ(check_forward(args(), ComputeDtype::f32).passes(), out != 0);
  }
  out_[0] = 1e-30F;
  EXPECT_FALSE(check_forward(args(), ComputeDtype::bf16).passes());
}

TEST_F(Check, DenormalQueriesMayBeLostByBf16ProductsAlone) {
  q_ = {0x1p-130F, 0};
  k_ = {0x1p127F, 0, -0x1p127F, 0, 0, 0};  // scores of 1/8, -1/8 and 0 times the scale
  AttentionForward call = args();
  call.softmax_scale = 16;  // 2, -2, 0
  EXPECT_TRUE(check_forward(call, ComputeDtype::bf16).passes());
  EXPECT_FALSE(check_forward(call, ComputeDtype::f32).passes());
}

/// dout 1: delta is 3, the gradients of the scores are (v - 3) / 3, and dv is the weight.
class CheckBackward : public Check {
 protected:
  AttentionBackward backward_args() {
    return {.dout = view(dout_.data(), {1, 1, 1, 1}),
            .forward = args(),
            .dq = view(dq_.data(), {1, 1, 1, 2}),
            .dk = view(dk_.data(), {1, 3, 1, 2}),
            .dv = view(dv_.data(), {1, 3, 1, 1})};
  }

  bool passes() {
    const auto differences = check_backward(backward_args(), ComputeDtype::f32);
    return std::ranges::all_of(differences, [](const auto& each) { return each.second.passes(); });
  }

  std::array<float, 1> dout_{1};
  std::array<float, 2> dq_{10 / (3 * std::sqrt(2.0F)), 10 / (3 * std::sqrt(2.0F))};
  std::array<float, 6> dk_{};
  std::array<float, 3> dv_{1 / 3.0F, 1 / 3.0F, 1 / 3.0F};
};

TEST_F(CheckBackward, RightGradientsPass) {
  EXPECT_TRUE(passes());
  EXPECT_EQ(check_backward(backward_args(), ComputeDtype::f32).size(), 3U);
}

TEST_F(CheckBackward, AWrongDigitFails) {
  dq_[1] *= 1.0001F;
  EXPECT_FALSE(passes());
}

TEST_F(CheckBackward, AGradientWhereNoneIsFails) {
  dk_[3] = 1e-4F;
  EXPECT_FALSE(passes());
}

TEST_F(CheckBackward, NanFails) {
  dv_[0] = std::nanf("");
  EXPECT_FALSE(passes());
}

TEST_F(CheckBackward, NanFailsThoughThePlainFormulaHasNanToo) {
  q_ = {1e30F, 1e30F};
  k_ = {1e10F, 1e10F, -1e10F, 1e10F, 1e10F, -1e10F};
  dq_.fill(std::nanf(""));
  dk_.fill(std::nanf(""));
  dv_.fill(std::nanf(""));
  for (const auto& [name, difference] : check_backward(backward_args(), ComputeDtype::f32)) {
    EXPECT_FALSE(difference.passes()) << name;
    EXPECT_GT(difference.num_beyond_f32, 0) << name;
  }
}

TEST_F(CheckBackward, ScoresOfNoDigitsAllowNoMoreThanTheSumsCanCome) {
  q_ = {1e10F, 1e10F};
  for (const auto& [name, difference] : check_backward(backward_args(), ComputeDtype::f32))
    EXPECT_LT(difference.allowed, name == "dk" ? 1e12 : 200) << name;
}

}  // namespace
}  // namespace fovea::tools
