#include "fovea/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>

#include "fovea/tensor.hpp"

namespace fovea {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Dtype, NamesAndSizesAgree) {
  EXPECT_EQ(name(Dtype::f32), "f32");
  EXPECT_EQ(name(Dtype::bf16), "bf16");
  EXPECT_EQ(name(Dtype::boolean), "bool");
  EXPECT_EQ(name(Dtype::i64), "i64");
  EXPECT_EQ(name(Dtype::e4m3), "e4m3");
  EXPECT_EQ(size_bytes(Dtype::f32), 4U);
  EXPECT_EQ(size_bytes(Dtype::f16), 2U);
  EXPECT_EQ(size_bytes(Dtype::bf16), 2U);
  EXPECT_EQ(size_bytes(Dtype::boolean), 1U);
  EXPECT_EQ(size_bytes(Dtype::u8), 1U);
  EXPECT_EQ(size_bytes(Dtype::i8), 1U);
  EXPECT_EQ(size_bytes(Dtype::i32), 4U);
  EXPECT_EQ(size_bytes(Dtype::i64), 8U);
  EXPECT_EQ(size_bytes(Dtype::e4m3), 1U);
}

template <typename T>
concept IsElement = Element<std::remove_const_t<T>>;

TEST(Dtype, FollowsFromTheElementType) {
  static_assert(dtype_of<float> == Dtype::f32);
  static_assert(dtype_of<float16> == Dtype::f16);
  static_assert(dtype_of<bfloat16> == Dtype::bf16);
  static_assert(dtype_of<bool> == Dtype::boolean);
  static_assert(dtype_of<std::uint8_t> == Dtype::u8);
  static_assert(dtype_of<std::int8_t> == Dtype::i8);
  static_assert(dtype_of<std::int32_t> == Dtype::i32);
  static_assert(dtype_of<std::int64_t> == Dtype::i64);
  static_assert(dtype_of<long long> == Dtype::i64);  // another type than std::int64_t here
  static_assert(IsElement<const float> && IsElement<float> && IsElement<const long long>);
}

TEST(Dtype, OtherTypesAreNoElements) {
  struct Pixel {
    float red, green, blue;
  };
  static_assert(!IsElement<double> && !IsElement<long double> && !IsElement<Pixel>);
  static_assert(!IsElement<std::uint16_t> && !IsElement<std::uint32_t>);
  static_assert(!IsElement<std::uint64_t> && !IsElement<std::int16_t>);
  static_assert(!IsElement<char> && !IsElement<std::byte> && !IsElement<float*>);
  static_assert(!IsElement<const double> && !IsElement<volatile float>);
}

TEST(Dtype, ThreeAreFloats) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) EXPECT_TRUE(is_float(dtype));
  for (const Dtype dtype :
       {Dtype::boolean, Dtype::u8, Dtype::i8, Dtype::i32, Dtype::i64, Dtype::e4m3})
    EXPECT_FALSE(is_float(dtype));
}

/// Every 16-bit pattern that is not NaN comes back from fp32 as itself.
template <typename Half>
void expect_all_patterns_return() {
  for (std::uint32_t pattern = 0; pattern < 0x10000U; ++pattern) {
    const Half half = Half::from_bits(static_cast<std::uint16_t>(pattern));
    const auto value = static_cast<float>(half);
    const Half back(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(back))) << pattern;
    } else {
      EXPECT_EQ(back.bits, half.bits) << pattern;
    }
  }
}

TEST(Float16, EveryPatternReturns) { expect_all_patterns_return<float16>(); }
TEST(Bfloat16, EveryPatternReturns) { expect_all_patterns_return<bfloat16>(); }

/// The midpoint of two neighbours goes to the even one, a step to either side to the nearer one.
template <typename Half>
void expect_nearest_even(std::uint16_t largest_finite) {
  for (std::uint16_t low = 0; low < largest_finite; ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    const auto a = static_cast<float>(Half::from_bits(low));
    const auto b = static_cast<float>(Half::from_bits(high));
    const float middle = a / 2 + b / 2;
    if (middle == a || middle == b) continue;  // below the smallest float
    EXPECT_EQ(Half(middle).bits, low % 2 == 0 ? low : high) << low;
    EXPECT_EQ(Half(std::nextafter(middle, 0.0F)).bits, low) << low;
    EXPECT_EQ(Half(std::nextafter(middle, kInfinity)).bits, high) << low;
    EXPECT_EQ(Half(-middle).bits, (low % 2 == 0 ? low : high) | 0x8000U) << low;
  }
}

TEST(Float16, RoundsToNearestEven) { expect_nearest_even<float16>(0x7bff); }
TEST(Bfloat16, RoundsToNearestEven) { expect_nearest_even<bfloat16>(0x7f7f); }

TEST(Float16, KnownPatterns) {
  EXPECT_EQ(float16(1.0F).bits, 0x3c00);
  EXPECT_EQ(float16(-2.0F).bits, 0xc000);
  EXPECT_EQ(float16(65504.0F).bits, 0x7bff);  // the largest
  EXPECT_EQ(float16(0x1p-24F).bits, 0x0001);  // the smallest
  EXPECT_EQ(float16(-0.0F).bits, 0x8000);
}

TEST(Float16, OverflowsWhereNearestIsInfinity) {
  EXPECT_EQ(float16(65519.996F).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(float16(-kInfinity).bits, 0xfc00);
}

TEST(Bfloat16, OverflowsWhereNearestIsInfinity) {
  EXPECT_EQ(bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(bfloat16(-kInfinity).bits, 0xff80);
  EXPECT_EQ(bfloat16(1.0F).bits, 0x3f80);
}

TEST(Bfloat16, NanWhosePayloadIsCutStaysNan) {
  const auto nan = std::bit_cast<float>(0x7f800001U);  // only bits that bf16 does not keep
  EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(nan))));
  EXPECT_TRUE(std::isnan(static_cast<float>(float16(nan))));
}

}  // namespace
}  // namespace fovea
