// The bit rules of rows of a cache, on numbers whose codes can be done on paper.
#include "quant/row_codes.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace fovea::quant {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(RowCodes, AScaleIsTheGreatestMagnitudeByTheLargestCode) {
  const std::array<float, 3> row{1.0F, -254.0F, 30.0F};
  EXPECT_EQ(row_scale(row, Dtype::i8), 2.0F);
  EXPECT_EQ(row_scale(row, Dtype::e4m3), 254.0F / 448.0F);
  EXPECT_EQ(row_scale(std::array<float, 2>{}, Dtype::i8), 0x1p-126F);
}

TEST(RowCodes, RowsThatAreNotFiniteSayItByTheirScale) {
  for (const float x : {std::nanf(""), kInfinity, -kInfinity}) {
    EXPECT_TRUE(std::isnan(row_scale(std::array<float, 3>{1, x, 2}, Dtype::i8)));
    EXPECT_TRUE(std::isnan(row_scale(std::array<float, 3>{1, 2, x}, Dtype::e4m3)));
  }
}

TEST(RowCodes, TiesGoToEvenAndLargeNumbersSaturate) {
  const auto int8 = [](float x) { return code_value(code_bits(x, Dtype::i8), Dtype::i8); };
  EXPECT_EQ(int8(0.5F), 0);
  EXPECT_EQ(int8(1.5F), 2);
  EXPECT_EQ(int8(-2.5F), -2);
  EXPECT_EQ(int8(-3.5F), -4);
  EXPECT_EQ(int8(127.6F), 127);
  EXPECT_EQ(int8(-kInfinity), -127);
  EXPECT_EQ(int8(std::nanf("")), 0);
  const auto e4m3 = [](float x) { return code_value(code_bits(x, Dtype::e4m3), Dtype::e4m3); };
  EXPECT_EQ(e4m3(17.0F), 16);  // between 16 and 18
  EXPECT_EQ(e4m3(19.0F), 20);
  EXPECT_EQ(e4m3(1000.0F), 448);
  EXPECT_EQ(e4m3(-0x1.8p-9F), -0x1p-8F);  // between one and two of the least steps
  EXPECT_TRUE(std::isnan(e4m3(std::nanf(""))));
}

}  // namespace
}  // namespace fovea::quant
