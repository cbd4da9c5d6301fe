// Sums of floats whose order does not matter (common/exact_sum.cuh), by the kernels that clear and write them.
#include "common/exact_sum.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/emulated_device.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Each value by a thread of its own.
float summed(const std::vector<float>& values) {
  Emulation emulation;
  auto* const sum = emulation.device.buffer<cuda::ExactSum>("sum", 1);
  auto* const out = emulation.device.buffer<float>("out", 1);
  auto* const terms = emulation.device.buffer("terms", values);
  cuda::SumsParams params{};
  params.sums = sum;
  params.num_sums = params.num_gradients = 1;
  params.gradients[0].data = out;
  params.gradients[0].element = cuda::Element::f32;
  const auto num = static_cast<std::uint32_t>(values.size());
  emulation.launch({.x = 1}, cuda::kExactSumThreads, 0, [&] { cuda::clear_sums(params); });
  emulation.launch({.x = (num + 31) / 32}, 32, 0, [&] {
    const auto at =
        static_cast<std::uint32_t>(cuda::ptx::block_idx().x * 32 + cuda::ptx::thread_idx().x);
    if (at < num) cuda::add_exactly(sum, cuda::ptx::ld_global(terms + at));
  });
  emulation.launch({.x = 1}, cuda::kExactSumThreads, 0, [&] { cuda::write_sums(params); });
  EXPECT_EQ(emulation.findings, "");
  return *out;
}

TEST(ExactSum, OfOneFloatIsThatFloat) {
  const Random random(1, 1);
  std::vector<float> values = {0x1p-149F, -0x1p-149F, 0x1.fffffcp-127F,
                               0x1p-126F, 1.0F,       -0x1.fffffep127F};
  for (std::int64_t i = 0; i < 100; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits(i)));
    if (std::isfinite(value)) values.push_back(value);
  }
  for (const float value : values) EXPECT_EQ(summed({value}), value) << value;
}

TEST(ExactSum, LosesNothingToLargeTermsThatCancel) {
  EXPECT_EQ(summed({0x1p127F, 0x1p-140F, 0x1p100F, -0x1p127F, 3.0F, -0x1p100F, -3.0F}), 0x1p-140F);
  EXPECT_EQ(summed({0x1p127F, 0x1p127F, -0x1p127F, -0x1p127F, -0x1p127F, 0x1p-3F}), -0x1p127F);
  EXPECT_EQ(summed({1.0F, -1.0F, -0x1p-149F}), -0x1p-149F);
}

TEST(ExactSum, HasTheBitsOfNoOrder) {
  const Random random(2, 1);
  std::vector<float> values;
  double sum = 0;
  for (std::int64_t i = 0; i < 500; ++i) {
    values.push_back(static_cast<float>(random.normal(i) * std::exp2(i % 20)));
    sum += values.back();
  }
  const float first = summed(values);
  EXPECT_FLOAT_EQ(first, static_cast<float>(sum));
  std::ranges::reverse(values);
  EXPECT_EQ(summed(values), first);
  std::ranges::sort(values);
  EXPECT_EQ(summed(values), first);
}

TEST(ExactSum, OfWhatIsNotFiniteIsWhatFloatsSay) {
  EXPECT_EQ(summed({1, kInfinity, -0x1.fffffep127F}), kInfinity);
  EXPECT_EQ(summed({-kInfinity, 2}), -kInfinity);
  EXPECT_EQ(summed({0x1.fffffep127F, 0x1.fffffep127F}), kInfinity);
  EXPECT_TRUE(std::isnan(summed({-kInfinity, 2, kInfinity})));
  EXPECT_TRUE(std::isnan(summed({1, std::nanf("")})));
}

}  // namespace
}  // namespace fovea::testing
