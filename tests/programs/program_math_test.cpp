// The errors that program.cuh states, with approximations that err by all that the PTX ISA allows, and the special
// cases of IEEE 754 and of C's pow.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "common/program.cuh"

namespace fovea::cuda::program {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Error relative to the exact value, to the least normal float where that is denormal.
double error(float got, double exact) {
  if (std::isnan(got) || std::isnan(exact)) return std::isnan(got) == std::isnan(exact) ? 0 : 1;
  const double limit = std::numeric_limits<float>::max();
  if (std::isinf(got)) return std::fabs(exact) >= limit && (got > 0) == (exact > 0) ? 0 : 1;
  return std::fabs(got - exact) / std::fmax(std::fabs(exact), 0x1p-126);
}

struct Domain {
  float begin, end;
};

/// Evenly by value and by exponent.
template <typename Function, typename Exact>
double worst_error(Domain domain, Function function, Exact exact) {
  std::mt19937 random(11);
  double worst = 0;
  for (int i = 0; i < 20000; ++i) {
    const double u = std::uniform_real_distribution<double>(0, 1)(random);
    const double even = domain.begin + (double{domain.end} - domain.begin) * u;
    const float x = static_cast<float>(
        i % 2 == 0 ? even : even * std::exp2(-static_cast<double>(random() % 40)));
    if (x < domain.begin || x > domain.end) continue;
    worst = std::fmax(worst, error(function(x), exact(double{x})));
  }
  return worst;
}

TEST(ProgramMath, ErrsByWhatItStates) {
  const auto worst = [](Domain domain, float (*function)(float), double (*exact)(double)) {
    return worst_error(domain, function, exact);
  };
  EXPECT_LT(worst({-80, 80}, exp, std::exp), 0x1p-20);
  EXPECT_LT(worst({-149, 128}, exp2, std::exp2), 0x1p-21);
  EXPECT_LT(worst({1e-44F, 3e38F}, log, std::log), 0x1p-19);
  EXPECT_LT(worst({1e-44F, 3e38F}, log2, std::log2), 0x1p-19);
  EXPECT_LT(worst({-20, 20}, tanh, std::tanh), 0x1p-21);
  EXPECT_LT(worst({-80, 80}, sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }), 0x1p-20);
  EXPECT_LT(worst({1e-44F, 3e38F}, rsqrt, [](double x) { return 1 / std::sqrt(x); }), 0x1p-23);
  EXPECT_LT(worst({-3e38F, 3e38F}, sin, std::sin), 0x1p-21);
  EXPECT_LT(worst({-3e38F, 3e38F}, cos, std::cos), 0x1p-21);
  EXPECT_LT(worst({-3e38F, 3e38F}, tan, std::tan), 0x1p-20);
  EXPECT_LT(worst({-40000, 40000}, sin, std::sin), 0x1p-21);
  EXPECT_LT(worst({-40000, 40000}, cos, std::cos), 0x1p-21);
  EXPECT_LT(worst({-7, 7}, tan, std::tan), 0x1p-20);
  EXPECT_LT(worst({-5, 5}, erf, std::erf), 0x1p-21);
  EXPECT_LT(worst({-1, 3e38F}, log1p, std::log1p), 0x1p-19);
  EXPECT_LT(worst({-1, 1}, log1p, std::log1p), 0x1p-19);
  EXPECT_LT(worst({-80, 80}, expm1, std::expm1), 0x1p-19);
  EXPECT_LT(worst({-1, 1}, expm1, std::expm1), 0x1p-19);
  EXPECT_LT(worst(
                {-3e38F, 3e38F}, [](float x) { return approx_div(x, 3.0F); },
                [](double x) { return x / 3; }),
            0x1p-22);
}

TEST(ProgramMath, QuotientsReachTheEndsOfTheRange) {
  for (const float divisor : {1e-44F, 1e-38F, 1.5e-20F, 7.0F, 3e20F, 1.7e38F, 3.4e38F}) {
    for (const float dividend : {1e-44F, 1e-10F, 1.0F, 3e38F}) {
      const double exact = double{dividend} / double{divisor};
      EXPECT_LT(error(approx_div(dividend, divisor), exact), 0x1p-22)
          << dividend << " / " << divisor;
    }
  }
  EXPECT_EQ(approx_div(1.0F, -0.0F), -kInf);
  EXPECT_EQ(approx_div(1.0F, kInf), 0.0F);
  EXPECT_TRUE(std::isnan(approx_div(0.0F, 0.0F)));
  EXPECT_TRUE(std::isnan(approx_div(kInf, kInf)));
}

TEST(ProgramMath, TanhMeetsItsEnds) {
  for (const float x : {9.0F, 20.0F, 3e38F, kInf}) {
    EXPECT_LT(error(tanh(x), 1), 0x1p-21) << x;
    EXPECT_LT(error(tanh(-x), -1), 0x1p-21) << x;
  }
  EXPECT_TRUE(std::isnan(tanh(kNan)));
  EXPECT_TRUE(std::signbit(tanh(-0.0F)));
  EXPECT_LT(error(tanh(1e-30F), 1e-30), 0x1p-21);
}

TEST(ProgramMath, Log2OfPowersOfTwoIsWhole) {
  for (int power = -149; power < 128; ++power) {
    EXPECT_EQ(log2(std::ldexp(1.0F, power)), static_cast<float>(power));
  }
}

TEST(ProgramMath, FloorIsTheLibrarys) {
  for (const float x : {0.0F, -0.0F, 0.5F, -0.5F, -1.0F, 2.999F, -3.001F, 8388607.5F, -8388607.5F,
                        1e10F, -1e30F, 1e-45F, -1e-45F, kInf, -kInf}) {
    EXPECT_EQ(floor(x), std::floor(x)) << x;
    EXPECT_EQ(std::signbit(floor(x)), std::signbit(std::floor(x))) << x;
  }
  EXPECT_TRUE(std::isnan(floor(kNan)));
}

TEST(ProgramMath, RoundingIsTheLibrarys) {
  for (const float x : {0.0F, -0.0F, 0.5F, -0.5F, 1.5F, 2.5F, -2.5F, 2.999F, -3.001F, 8388607.5F,
                        -8388607.5F, 4194304.5F, 1e10F, -1e30F, 1e-45F, -1e-45F, kInf, -kInf}) {
    const auto expect_same = [x](float got, float expected) {
      EXPECT_EQ(got, expected) << x;
      EXPECT_EQ(std::signbit(got), std::signbit(expected)) << x;
    };
    expect_same(round(x), std::nearbyint(x));
    expect_same(ceil(x), std::ceil(x));
    expect_same(trunc(x), std::trunc(x));
  }
  EXPECT_TRUE(std::isnan(round(kNan)) && std::isnan(ceil(kNan)) && std::isnan(trunc(kNan)));
}

TEST(ProgramMath, AnglesAndTheirEnds) {
  for (const float x : {kInf, -kInf, kNan})
    EXPECT_TRUE(std::isnan(sin(x)) && std::isnan(cos(x)) && std::isnan(tan(x))) << x;
  EXPECT_TRUE(std::signbit(sin(-0.0F)));
  EXPECT_EQ(cos(0.0F), 1.0F);
  for (const float x : {1e-45F, 1e-20F, 32767.0F, 32768.0F, 32769.0F, 105615.0F, 0x1.fffffep+127F,
                        1.5707964F, 3.1415927F, 6.2831855F, 710.0F, 1e22F}) {
    for (const float a : {x, -x}) {
      EXPECT_LT(error(sin(a), std::sin(double{a})), 0x1p-21) << a;
      EXPECT_LT(error(cos(a), std::cos(double{a})), 0x1p-21) << a;
    }
  }
  EXPECT_TRUE(std::signbit(erf(-0.0F)) && std::signbit(expm1(-0.0F)) && std::signbit(log1p(-0.0F)));
  EXPECT_EQ(erf(kInf), 1.0F);
  EXPECT_EQ(erf(-kInf), -1.0F);
  EXPECT_EQ(expm1(-kInf), -1.0F);
  EXPECT_EQ(expm1(kInf), kInf);
  EXPECT_EQ(log1p(kInf), kInf);
  EXPECT_EQ(log1p(-1.0F), -kInf);
  EXPECT_TRUE(std::isnan(log1p(-1.5F)) && std::isnan(erf(kNan)) && std::isnan(expm1(kNan)));
}

TEST(ProgramMath, RemaindersAreExact) {
  const auto expected = [](float a, float b) {
    const double rest = std::fmod(double{a}, double{b});
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  };
  for (const float a : {0.0F, 1.0F, -1.0F, 7.25F, -7.25F, 1e10F, -3e38F, 1e-45F}) {
    for (const float b : {3.0F, -3.0F, 0.1F, -1e-40F, 2e38F, kInf}) {
      EXPECT_EQ(mod(a, b), static_cast<float>(expected(a, b))) << a << " % " << b;
      EXPECT_EQ(fmod(a, b), std::fmod(a, b)) << a << ", " << b;
    }
  }
  EXPECT_TRUE(std::isnan(mod(1.0F, 0.0F)));
  EXPECT_TRUE(std::isnan(mod(kInf, 2.0F)));
  EXPECT_TRUE(std::isnan(mod(kNan, 2.0F)));
}

TEST(ProgramMath, PowHasTheSpecialCasesOfC) {
  const float bases[] = {0.0F, -0.0F, 1.0F, -1.0F, 2.0F, -2.0F, 0.5F, -0.5F, kInf, -kInf, kNan};
  const float exponents[] = {0.0F, -0.0F, 1.0F,  -1.0F, 2.0F,  3.0F, -3.0F,
                             0.5F, -0.5F, 1e30F, kInf,  -kInf, kNan};
  for (const float base : bases) {
    for (const float exponent : exponents) {
      const float got = pow(base, exponent);
      const float exact = std::pow(base, exponent);
      EXPECT_LT(error(got, exact), 0x1p-20) << base << " ^ " << exponent << " is " << got;
      EXPECT_TRUE(std::isnan(got) || std::signbit(got) == std::signbit(exact))
          << base << " ^ " << exponent;
    }
  }
}

TEST(ProgramMath, IntsWrapAndDivideTowardsMinusInfinity) {
  EXPECT_EQ((Int(kGreatestInt) + 1).value, kLeastInt);
  EXPECT_EQ((-Int(kLeastInt)).value, kLeastInt);
  EXPECT_EQ(floor_div(Int(kLeastInt), Int(-1)).value, kLeastInt);
  EXPECT_EQ(mod(Int(kLeastInt), Int(-1)).value, 0);
  EXPECT_EQ(floor_div(Int(-7), Int(2)).value, -4);
  EXPECT_EQ(mod(Int(7), Int(-2)).value, -1);
  EXPECT_EQ(floor_div(Int(7), Int(0)).value, 0);
  EXPECT_EQ((Int(1) << 33).value, 2);
  EXPECT_EQ((Int(-8) >> 1).value, -4);
}

TEST(ProgramMath, FloatsBecomeIntsBySaturation) {
  EXPECT_EQ(to_int(kNan).value, 0);
  EXPECT_EQ(to_int(3e9F).value, kGreatestInt);
  EXPECT_EQ(to_int(-kInf).value, kLeastInt);
  EXPECT_EQ(to_int(-2.9F).value, -2);
  EXPECT_EQ(to_int(2147483520.0F).value, 2147483520);
}

}  // namespace
}  // namespace fovea::cuda::program
