#include "fovea/tensor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "fovea/error.hpp"

namespace fovea {
namespace {

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(not refused)";
}

TensorSpec spec_of(const std::vector<std::int64_t>& shape,
                   const std::vector<std::int64_t>& strides = {}) {
  return make_spec(Dtype::f32, shape, strides);
}

TEST(TensorSpec, StridesAreRowMajorUnlessGiven) {
  const TensorSpec spec = spec_of({2, 3, 5});
  EXPECT_EQ(spec.rank, 3);
  EXPECT_EQ(spec.num_elements(), 30);
  EXPECT_EQ(spec.strides, (std::array<std::int64_t, kMaxRank>{15, 5, 1}));
  EXPECT_EQ(spec_of({2, 3}, {-3, 0}).strides, (std::array<std::int64_t, kMaxRank>{-3, 0}));
}

TEST(TensorSpec, NoDimensionAndEmptyDimensionsAreLegal) {
  EXPECT_EQ(spec_of({}).rank, 0);
  const TensorSpec empty = spec_of({4, 0, 7});
  EXPECT_EQ(empty.num_elements(), 0);
}

TEST(TensorSpec, RefusesWhatIsNoTensor) {
  EXPECT_EQ(refusal([] { spec_of(std::vector<std::int64_t>(9, 1)); }),
            "tensor rank is 9; expected at most 8");
  EXPECT_EQ(refusal([] { spec_of({2, -3}); }), "tensor dimension 1 is -3; expected >= 0");
  EXPECT_EQ(refusal([] {
              spec_of({2, 3}, {1});
            }),
            "tensor has 1 strides for 2 dimensions; expected one each");
  EXPECT_EQ(refusal([] {
              spec_of({1LL << 32, 1LL << 31});
            }),
            "tensor shape [4294967296, 2147483648] has more than 2^63 elements");
}

TEST(TensorSpec, LargestShapesThatCountAreLegal) {
  EXPECT_EQ(spec_of({1LL << 31, 1LL << 31}).num_elements(), 1LL << 62);
}

TEST(TensorSpec, TextShowsStridesOnlyWhereTheyAreNotRowMajor) {
  EXPECT_EQ(to_string(make_spec(Dtype::bf16, std::vector<std::int64_t>{2, 128})), "bf16 [2, 128]");
  EXPECT_EQ(to_string(spec_of({2, 3}, {1, 2})), "f32 [2, 3] strides [1, 2]");
}

TEST(TensorView, DefaultIsNotGiven) {
  const TensorView none;
  EXPECT_FALSE(none);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(none.mutable_data(), nullptr);
}

TEST(TensorView, TakesDtypeAndWritabilityFromThePointer) {
  float16 data[6] = {};
  const TensorView writable = view(data, {2, 3});
  EXPECT_TRUE(writable);
  EXPECT_EQ(writable.dtype(), Dtype::f16);
  EXPECT_EQ(writable.mutable_data(), data);
  const TensorView constant = view(static_cast<const float16*>(data), {2, 3});
  EXPECT_FALSE(constant.is_mutable());
  EXPECT_EQ(constant.mutable_data(), nullptr);
  EXPECT_EQ(constant.data(), data);
}

TEST(TensorView, PermutedReordersShapeAndStrides) {
  float data[2 * 3 * 5 * 7] = {};
  const TensorView bhsd = view(data, {2, 3, 5, 7});
  const TensorView bshd = bhsd.permuted({0, 2, 1, 3});
  EXPECT_EQ(to_string(bshd.spec()), "f32 [2, 5, 3, 7] strides [105, 7, 35, 1]");
  EXPECT_EQ(bshd.data(), data);
  EXPECT_TRUE(bshd.is_mutable());
  EXPECT_EQ(bshd.permuted({0, 2, 1, 3}), bhsd);
}

TEST(TensorView, PermutedRefusesWhatIsNoOrder) {
  float data[6] = {};
  const TensorView matrix = view(data, {2, 3});
  EXPECT_EQ(refusal([&] {
              matrix.permuted({0, 0});
            }),
            "permuted order is (0, 0); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] {
              matrix.permuted({0, 2});
            }),
            "permuted order is (0, 2); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] {
              matrix.permuted({-1, 0});
            }),
            "permuted order is (-1, 0); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] { matrix.permuted({1}); }), "permuted order has 1 dimensions; expected 2");
}

}  // namespace
}  // namespace fovea
