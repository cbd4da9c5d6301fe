// Errors of the vector functions against the C library in fp64, on every target that runs here.
#include "cpu/kernels/highway.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "unit/cpu/math_test.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu/kernels/math-inl.hpp"

#ifndef FOVEA_TESTS_MATH_FUNCTIONS_
#define FOVEA_TESTS_MATH_FUNCTIONS_
namespace fovea::cpu {
enum class MathFunction {
  exp2_nonpositive,
  exp2,
  exp,
  tanh,
  sigmoid,
  log,
  log2,
  rsqrt,
  sin,
  cos,
  tan,
  erf,
  log1p,
  expm1
};
}
#endif

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {

template <class D>
hn::Vec<D> apply_math(D d, MathFunction function, hn::Vec<D> x) {
  switch (function) {
    case MathFunction::exp2_nonpositive:
      return exp2_nonpositive(d, x, hn::Set(d, 1.0F), hn::Set(d, kZeroPower));
    case MathFunction::exp2:
      return exp2(d, x);
    case MathFunction::exp:
      return exp(d, x);
    case MathFunction::tanh:
      return tanh(d, x);
    case MathFunction::sigmoid:
      return sigmoid(d, x);
    case MathFunction::log:
      return log(d, x);
    case MathFunction::log2:
      return log2(d, x);
    case MathFunction::rsqrt:
      return rsqrt(d, x);
    case MathFunction::sin:
      return sin(d, x);
    case MathFunction::cos:
      return cos(d, x);
    case MathFunction::tan:
      return tan(d, x);
    case MathFunction::erf:
      return erf(d, x);
    case MathFunction::log1p:
      return log1p(d, x);
    case MathFunction::expm1:
      return expm1(d, x);
  }
  return x;
}

/// values[0..16) <- function(values)
void math_for_test(MathFunction function, float* values) {
  const hn::CappedTag<float, 16> d;
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) {
    hn::StoreU(apply_math(d, function, hn::LoadU(d, values + i)), d, values + i);
  }
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "unit/cpu/compiled_targets.hpp"

namespace fovea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<CompiledTarget<void(MathFunction, float*)>> targets() {
  std::vector<CompiledTarget<void(MathFunction, float*)>> table;
  FOVEA_COMPILED_TARGETS(table, math_for_test);
  return table;
}

double exact(MathFunction function, double x) {
  switch (function) {
    case MathFunction::exp2_nonpositive:
      return x < -99.5 ? 0 : std::exp2(x);  // rounds to n = -100, the factor 0
    case MathFunction::exp2:
      return std::exp2(x);
    case MathFunction::exp:
      return std::exp(x);
    case MathFunction::tanh:
      return std::tanh(x);
    case MathFunction::sigmoid:
      return 1 / (1 + std::exp(-x));
    case MathFunction::log:
      return std::log(x);
    case MathFunction::log2:
      return std::log2(x);
    case MathFunction::rsqrt:
      return 1 / std::sqrt(x);
    case MathFunction::sin:
      return std::sin(x);
    case MathFunction::cos:
      return std::cos(x);
    case MathFunction::tan:
      return std::tan(x);
    case MathFunction::erf:
      return std::erf(x);
    case MathFunction::log1p:
      return std::log1p(x);
    case MathFunction::expm1:
      return std::expm1(x);
  }
  return kNan;
}

/// In ulp of the exact value; where that is not finite in fp32, 0 or infinity. A value that rounds
/// to infinity may come out as the greatest float and the other way round.
double error_ulps(float got, double expected) {
  if (std::isnan(expected)) return std::isnan(got) ? 0 : kInfinity;
  const auto rounded = static_cast<float>(expected);
  if (got == rounded) return 0;
  if (std::isinf(expected)) return kInfinity;
  constexpr float kMax = std::numeric_limits<float>::max();
  const float magnitude = std::min(std::fabs(rounded), std::nextafter(kMax, 0.0F));
  const double ulp = double{std::nextafter(magnitude, kMax)} - magnitude;
  const double finite = std::isinf(got) ? std::copysign(0x1p128, got) : got;
  return std::fabs(finite - expected) / ulp;
}

struct Worst {
  double error = 0;
  float x = 0;
};

/// Over every `stride`-th float of all 2^32 that is at most `highest` or NaN.
Worst worst_error(void (*function)(MathFunction, float*), MathFunction which, float highest) {
  constexpr std::uint64_t kStride = 4099;  // a prime: all exponents, all patterns of low bits
  Worst worst;
  for (std::uint64_t bits = 0; bits < (1ULL << 32U); bits += 16 * kStride) {
    float x[16];
    float y[16];
    for (std::uint64_t i = 0; i < 16; ++i) {
      x[i] = std::bit_cast<float>(static_cast<std::uint32_t>(bits + i * kStride));
      if (x[i] > highest) x[i] = -x[i];
      y[i] = x[i];
    }
    function(which, y);
    for (int i = 0; i < 16; ++i) {
      const double error = error_ulps(y[i], exact(which, x[i]));
      if (!(error <= worst.error)) worst = {error, x[i]};
    }
  }
  return worst;
}

struct Bound {
  MathFunction function;
  double ulps;  // as the docstring says; exp2_nonpositive: relative error over 2^-24
  float highest = std::numeric_limits<float>::infinity();
};

constexpr Bound kBounds[] = {
    {MathFunction::exp2_nonpositive, 3, 0.0F},
    {MathFunction::exp2, 2},
    {MathFunction::exp, 2},
    {MathFunction::tanh, 3},
    {MathFunction::sigmoid, 4},
    {MathFunction::log, 2},
    {MathFunction::log2, 3},
    {MathFunction::rsqrt, 2},
    {MathFunction::sin, 3},
    {MathFunction::cos, 3},
    {MathFunction::tan, 6},
    {MathFunction::erf, 3},
    {MathFunction::log1p, 4},
    {MathFunction::expm1, 3},
};

TEST(Math, ErrorsStayWithinTheStatedUlps) {
  for (const auto& target : targets()) {
    for (const Bound& bound : kBounds) {
      const Worst worst = worst_error(target.function, bound.function, bound.highest);
      EXPECT_LE(worst.error, bound.ulps)
          << target.name << " function " << static_cast<int>(bound.function) << " at " << worst.x;
    }
  }
}

TEST(Math, SpecialValuesAreExact) {
  constexpr float kSpecial[16] = {0.0F,     -0.0F,   -1.0F,   1.0F,        8.0F,    -INFINITY,
                                  INFINITY, NAN,     -126.0F, -126.00001F, -149.0F, -151.0F,
                                  1e-45F,   -1e-45F, 128.0F,  3e38F};
  for (const auto& target : targets()) {
    for (const Bound& bound : kBounds) {
      float y[16];
      for (int i = 0; i < 16; ++i) y[i] = kSpecial[i] > bound.highest ? 0.0F : kSpecial[i];
      float x[16];
      std::copy_n(y, 16, x);
      target.function(bound.function, y);
      for (int i = 0; i < 16; ++i) {
        EXPECT_LE(error_ulps(y[i], exact(bound.function, x[i])), bound.ulps)
            << target.name << " function " << static_cast<int>(bound.function) << " at " << x[i];
      }
    }
  }
}

float at(void (*function)(MathFunction, float*), MathFunction which, float x) {
  float values[16];
  std::fill_n(values, 16, x);
  function(which, values);
  return values[0];
}

TEST(Math, SoftmaxOfTheRowMaximumIsOneAndOfHiddenKeysZero) {
  for (const auto& target : targets()) {
    EXPECT_EQ(at(target.function, MathFunction::exp2_nonpositive, 0.0F), 1.0F);
    EXPECT_EQ(at(target.function, MathFunction::exp2_nonpositive, -INFINITY), 0.0F);
    EXPECT_EQ(at(target.function, MathFunction::exp2_nonpositive, -99.6F), 0.0F);
    EXPECT_GT(at(target.function, MathFunction::exp2_nonpositive, -99.4F), 0.0F);
  }
}

// The exponent is made from the low bits of a sum that a NaN's payload passes through.
TEST(Math, NanOfAnyPayloadStaysNan) {
  for (const auto& target : targets()) {
    for (const Bound& bound : kBounds) {
      for (const std::uint32_t bits :
           {0x7fc00000U, 0x7fc00001U, 0x7fffffffU, 0xffc00001U, 0xffc000ffU}) {
        EXPECT_TRUE(std::isnan(at(target.function, bound.function, std::bit_cast<float>(bits))))
            << target.name << " function " << static_cast<int>(bound.function) << " bits " << bits;
      }
    }
  }
}

TEST(Math, SignsOfZeroAndPowersOfTwoAreKept) {
  for (const auto& target : targets()) {
    EXPECT_TRUE(std::signbit(at(target.function, MathFunction::tanh, -0.0F)));
    for (int n = -149; n < 128; ++n) {
      const auto power = static_cast<float>(std::exp2(n));
      EXPECT_EQ(at(target.function, MathFunction::log2, power), static_cast<float>(n));
      EXPECT_EQ(at(target.function, MathFunction::exp2, static_cast<float>(n)), power);
    }
  }
}

}  // namespace
}  // namespace fovea::cpu

#endif  // HWY_ONCE
