// Powers of 2 by polynomial, two at a time: as near as ex2 is, and right where they leave the range of floats.
#include "sm100/forward/row.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cuda/emulator/emulator.hpp"

namespace fovea::cuda {
namespace {

constexpr int kThreads = 32;

/// In both places of pairs, beside another power.
std::vector<ptx::F32x2> powers_of(std::vector<ptx::F32x2> arguments) {
  std::vector<ptx::F32x2> powers(arguments.size());
  emulator::Device device;
  device.register_buffer("arguments", arguments.data(), arguments.size() * sizeof(ptx::F32x2));
  device.register_buffer("powers", powers.data(), powers.size() * sizeof(ptx::F32x2));
  const emulator::Report report =
      device.launch({.grid = {1, 1, 1}, .block = {kThreads, 1, 1}}, {}, [&] {
        for (std::size_t i = ptx::thread_idx().x; i < arguments.size(); i += kThreads) {
          const auto power = sm100::exp2_by_polynomial(ptx::ld_global(arguments.data() + i));
          ptx::st_global(powers.data() + i, power);
        }
      });
  EXPECT_EQ(report.text(), "");
  return powers;
}

TEST(PowersByPolynomial, AreAsNearAsThoseOfEx2) {
  std::vector<ptx::F32x2> arguments;
  for (int i = 0; i < 20000; ++i) {
    const float x = -126.0F + 0.0126F * static_cast<float>(i);  // to 126, at all fractions
    arguments.push_back({x, -x});
  }
  const auto powers = powers_of(arguments);
  const auto error = [](float x, float power) {
    return std::abs(static_cast<double>(power) / std::exp2(static_cast<double>(x)) - 1);
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    ASSERT_LE(error(arguments[i].x, powers[i].x), 0x1p-22) << arguments[i].x;
    ASSERT_LE(error(arguments[i].y, powers[i].y), 0x1p-22) << arguments[i].y;
  }
}

TEST(PowersByPolynomial, LeaveTheRangeOfFloatsOnBothSides) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto powers = powers_of({{-infinity, infinity},
                                 {-127.0F, 128.0F},
                                 {-1e30F, 1e30F},
                                 {nan, 0.0F},
                                 {0.0F, nan},
                                 {-1.0F, 1.0F}});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(powers[i].x, 0) << i;
    EXPECT_EQ(powers[i].y, infinity) << i;
  }
  EXPECT_TRUE(std::isnan(powers[3].x));
  EXPECT_NEAR(powers[3].y, 1, 0x1p-22);
  EXPECT_NEAR(powers[4].x, 1, 0x1p-22);
  EXPECT_TRUE(std::isnan(powers[4].y));
  EXPECT_NEAR(powers[5].x, 0.5, 0x1p-23);
  EXPECT_NEAR(powers[5].y, 2, 0x1p-21);
}

}  // namespace
}  // namespace fovea::cuda
