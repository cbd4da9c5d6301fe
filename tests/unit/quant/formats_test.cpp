#include "quant/formats.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace fovea::quant {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// All finite numbers of e4m3 from 0 on, by its definition: exponent bias 7, denormals below 2^-6.
std::vector<double> positive_numbers() {
  std::vector<double> numbers;
  for (int bits = 0; bits < 127; ++bits) {
    const int exponent = bits / 8;
    const double fraction = bits % 8 / 8.0;
    numbers.push_back(exponent == 0 ? std::ldexp(fraction, -6)
                                    : std::ldexp(1 + fraction, exponent - 7));
  }
  return numbers;
}

TEST(E4m3, BitsAndValuesAreEachOthersInverse) {
  const std::vector<double> numbers = positive_numbers();
  EXPECT_EQ(numbers.back(), 448);
  for (std::size_t bits = 0; bits < numbers.size(); ++bits) {
    const auto value = static_cast<float>(numbers[bits]);
    const auto code = static_cast<std::uint8_t>(bits);
    EXPECT_EQ(e4m3_value(code), value);
    EXPECT_EQ(e4m3_value(code | 0x80U), -value);
    EXPECT_EQ(e4m3_bits(value), code);
    EXPECT_EQ(e4m3_bits(-value), code | 0x80U);
  }
  EXPECT_TRUE(std::isnan(e4m3_value(0x7f)));
  EXPECT_TRUE(std::isnan(e4m3_value(0xff)));
}

TEST(E4m3, RoundsToNearestAndTiesToEven) {
  const std::vector<double> numbers = positive_numbers();
  for (std::size_t below = 0; below + 1 < numbers.size(); ++below) {
    const auto middle = static_cast<float>((numbers[below] + numbers[below + 1]) / 2);
    const std::size_t even = below % 2 == 0 ? below : below + 1;
    EXPECT_EQ(e4m3_bits(middle), even) << middle;
    EXPECT_EQ(e4m3_bits(std::nextafter(middle, 0.0F)), below) << middle;
    EXPECT_EQ(e4m3_bits(std::nextafter(middle, kInfinity)), below + 1) << middle;
  }
}

TEST(E4m3, SaturatesAndKeepsNaN) {
  for (const float large : {448.0F, 449.0F, 464.0F, 1e30F, kInfinity}) {
    EXPECT_EQ(e4m3_bits(large), 0x7e);
    EXPECT_EQ(e4m3_bits(-large), 0xfe);
  }
  EXPECT_EQ(e4m3_bits(kNaN), 0x7f);
  EXPECT_EQ(e4m3_bits(-0.0F), 0x80);
  EXPECT_EQ(e4m3_bits(0x1p-149F), 0);
}

/// All of e2m1, by its definition: exponent bias 1, one bit of mantissa, denormals below 1.
TEST(E2m1, BitsAndValuesAreEachOthersInverse) {
  for (std::uint8_t bits = 0; bits < 8; ++bits) {
    const int exponent = bits / 2;
    const double fraction = bits % 2 / 2.0;
    const double number = exponent == 0 ? fraction : std::ldexp(1 + fraction, exponent - 1);
    EXPECT_EQ(e2m1_value(bits), number);
    EXPECT_EQ(e2m1_value(bits | 8U), -number);
    EXPECT_EQ(e2m1_bits(static_cast<float>(number)), bits);
    EXPECT_EQ(e2m1_bits(static_cast<float>(-number)), bits | 8U);
  }
}

TEST(E2m1, RoundsToNearestAndTiesToEven) {
  for (std::uint8_t below = 0; below < 7; ++below) {
    const float middle = (e2m1_value(below) + e2m1_value(below + 1)) / 2;
    EXPECT_EQ(e2m1_bits(middle), below % 2 == 0 ? below : below + 1) << middle;
    EXPECT_EQ(e2m1_bits(std::nextafter(middle, 0.0F)), below) << middle;
    EXPECT_EQ(e2m1_bits(std::nextafter(middle, kInfinity)), below + 1) << middle;
  }
}

TEST(E2m1, SaturatesAndHasNoNaN) {
  for (const float large : {6.0F, 6.5F, 1e30F, kInfinity}) {
    EXPECT_EQ(e2m1_bits(large), 7);
    EXPECT_EQ(e2m1_bits(-large), 15);
  }
  EXPECT_EQ(e2m1_bits(kNaN), 7);
  EXPECT_EQ(e2m1_bits(-0.0F), 8);
  EXPECT_EQ(e2m1_bits(0x1p-149F), 0);
}

/// Every exponent, at the greatest number that a scale is enough for, at the next, and at both ends.
TEST(Ue8m0, IsTheLeastPowerOfTwoThatSaturatesNothing) {
  for (int bits = 1; bits <= 252; ++bits) {
    const auto scale = static_cast<std::uint8_t>(bits);
    EXPECT_EQ(ue8m0_value(scale), std::ldexp(1.0F, bits - 127));
    const float most = 6 * ue8m0_value(scale);
    EXPECT_EQ(ue8m0_scale_bits(most), scale);
    EXPECT_EQ(ue8m0_scale_bits(std::nextafter(most, kInfinity)), scale + 1);
    EXPECT_EQ(ue8m0_scale_bits(std::nextafter(most, 0.0F)), scale);
    EXPECT_EQ(ue8m0_scale_bits(most / 2), std::max(1, bits - 1));
  }
  EXPECT_EQ(ue8m0_scale_bits(0), 1);
  EXPECT_EQ(ue8m0_scale_bits(0x1p-149F), 1);
  EXPECT_EQ(ue8m0_scale_bits(std::numeric_limits<float>::max()), 253);
}

/// Every number of e4m3 is the scale of six times itself; beside it decide the middles.
TEST(Ue4m3, IsTheNearestToASixthOfTheGreatest) {
  const std::vector<double> numbers = positive_numbers();
  for (std::size_t bits = 0; bits < numbers.size(); ++bits) {
    const auto value = static_cast<float>(numbers[bits]);
    EXPECT_EQ(ue4m3_scale_bits(6 * value), bits);
    if (bits + 1 == numbers.size()) continue;
    const auto middle = static_cast<float>((numbers[bits] + numbers[bits + 1]) / 2);
    EXPECT_EQ(ue4m3_scale_bits(6 * middle * (1 - 0x1p-20F)), bits);
    EXPECT_EQ(ue4m3_scale_bits(6 * middle * (1 + 0x1p-20F)), bits + 1);
  }
  EXPECT_EQ(ue4m3_scale_bits(1e30F), 0x7e);
  EXPECT_EQ(ue4m3_scale_bits(0), 0);
}

TEST(Codes, OfInt8StopAt127) {
  EXPECT_EQ(int8_code(126.5F), 126);
  EXPECT_EQ(int8_code(-125.5F), -126);
  EXPECT_EQ(int8_code(127.6F), 127);
  EXPECT_EQ(int8_code(-128.0F), -127);
}

TEST(Codes, OfF16StopAtItsLargest) {
  EXPECT_EQ(f16_code(1e6F), 65504);
  EXPECT_EQ(f16_code(-kInfinity), -65504);
  EXPECT_EQ(f16_code(1 + 0x1p-11F), 1);
}

TEST(Codes, LinearOnesAreExactAtPowersOfTwoAndAChordBetween) {
  for (int exponent = -6; exponent <= 8; ++exponent)
    EXPECT_EQ(linear_code(static_cast<float>(exponent)), std::ldexp(1.0F, exponent));
  EXPECT_EQ(linear_code(0.5F), 1.5F);
  EXPECT_EQ(linear_code(-7), 0);
  EXPECT_EQ(linear_code(-kInfinity), 0);
  EXPECT_EQ(linear_code(100), 448);
  EXPECT_TRUE(std::isnan(linear_code(kNaN)));
}

TEST(Codes, LinearOnesAreLargerByTheirMean) {
  constexpr int kSteps = 8000;
  double sum = 0;
  for (int i = 0; i < kSteps; ++i) {
    const double exponent = (i + 0.5) / kSteps;
    sum += linear_code(static_cast<float>(exponent)) / std::exp2(exponent);
  }
  EXPECT_NEAR(sum / kSteps, kLinearMean, 1e-3);
}

TEST(Scales, OfNothingAndOfTheSmallestHaveReciprocals) {
  EXPECT_EQ(scale_of(254, kInt8Max), 2);
  for (const float least : {0.0F, 0x1p-149F, 0x1p-126F}) {
    const float scale = scale_of(least, kInt8Max);
    EXPECT_TRUE(std::isfinite(1 / scale));
    EXPECT_LE(least * (1 / scale), 127.5F);
  }
}

}  // namespace
}  // namespace fovea::quant
