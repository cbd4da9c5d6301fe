#include "fovea/tensor.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <span>
#include <string>
#include <utility>
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
              spec_of({2, 3}, {3, 1, 1});
            }),
            "tensor has 3 strides for 2 dimensions; expected one each");
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

TEST(TensorView, RanksThatNoTensorHasAreRefused) {
  float data[1] = {};
  for (const int rank : {-1, kMaxRank + 1, std::numeric_limits<int>::max()}) {
    EXPECT_EQ(refusal([&] { TensorView(data, TensorSpec{.rank = rank}); }),
              "tensor rank is " + std::to_string(rank) + "; expected 0 to 8");
  }
}

TEST(TensorSpec, TextOfSpecsMadeByHand) {
  EXPECT_EQ(to_string(TensorSpec{.rank = 9}), "f32 of rank 9");
  EXPECT_EQ(to_string(TensorSpec{.rank = -1}), "f32 of rank -1");
  EXPECT_EQ(to_string(TensorSpec{.rank = 2, .shape = {-1, 3}, .strides = {3, 1}}), "f32 [-1, 3]");
  EXPECT_EQ(to_string(TensorSpec{
                .rank = 3, .shape = {1LL << 40, 1LL << 40, 2}, .strides = {1LL << 41, 2, 1}}),
            "f32 [1099511627776, 1099511627776, 2]");
}

TEST(TensorView, Words32AreTheHalvesOfLongWords) {
  std::int64_t bits[2][3] = {{0x0000000180000002, -1, 0}, {1, 2, std::int64_t{1} << 63}};
  const TensorView words = as_words32(view(&bits[0][0], {2, 3}));
  EXPECT_EQ(to_string(words.spec()), "i32 [2, 3, 2]");
  EXPECT_TRUE(words.is_mutable());
  const auto* low = static_cast<const std::int32_t*>(words.data());
  EXPECT_EQ(low[0], static_cast<std::int32_t>(0x80000002U));
  EXPECT_EQ(low[1], 1);
  const std::int64_t last =
      words.stride(0) * 1 + words.stride(1) * 2 + words.stride(2) * 1;  // the high half of 2^63
  EXPECT_EQ(low[last], std::numeric_limits<std::int32_t>::min());
  const TensorView columns = as_words32(view(&std::as_const(bits[0][0]), {3, 2}, {1, 3}));
  EXPECT_EQ(to_string(columns.spec()), "i32 [3, 2, 2] strides [2, 6, 1]");
  EXPECT_FALSE(columns.is_mutable());
}

TEST(TensorView, Words32AreOfLongWordsOnly) {
  std::int32_t word = 0;
  std::int64_t longer = 0;
  EXPECT_EQ(refusal([&] { static_cast<void>(as_words32(view(&word, {1}))); }),
            "as_words32 of i32 [1]; expected i64 of rank 1 to 7");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(as_words32(view(&longer, {1, 1, 1, 1, 1, 1, 1, 1})));
            }),
            "as_words32 of i64 [1, 1, 1, 1, 1, 1, 1, 1]; expected i64 of rank 1 to 7");
  EXPECT_EQ(refusal([] { static_cast<void>(as_words32({})); }),
            "as_words32 of nothing; expected i64 of rank 1 to 7");
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
              static_cast<void>(matrix.permuted({0, 0}));
            }),
            "permuted order is (0, 0); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(matrix.permuted({0, 2}));
            }),
            "permuted order is (0, 2); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] {
              static_cast<void>(matrix.permuted({-1, 0}));
            }),
            "permuted order is (-1, 0); expected each of 0..1 once");
  EXPECT_EQ(refusal([&] { static_cast<void>(matrix.permuted({1})); }),
            "permuted order has 1 dimensions; expected 2");
}

// ---- views of spans and of what is shaped like std::mdspan ----

TEST(View, OfASpanIsAListOrARowMajorTensor) {
  std::array<float, 6> data{};
  const TensorView list = view(std::span(data));
  EXPECT_EQ(to_string(list.spec()), "f32 [6]");
  EXPECT_EQ(list.data(), data.data());
  EXPECT_TRUE(list.is_mutable());
  const TensorView matrix = view(std::span<const float>(data), {2, 3});
  EXPECT_EQ(to_string(matrix.spec()), "f32 [2, 3]");
  EXPECT_FALSE(matrix.is_mutable());
  EXPECT_EQ(to_string(view(std::span(data), {5}).spec()), "f32 [5]");
}

TEST(View, OfASpanRefusesAShapeThatReachesBeyondIt) {
  std::array<float, 6> data{};
  EXPECT_EQ(refusal([&] { static_cast<void>(view(std::span(data), {7})); }),
            "tensor shape [7] has 7 elements; expected at most 6, those of the span");
  EXPECT_EQ(refusal([&] { static_cast<void>(view(std::span(data), {-1})); }),
            "tensor dimension 0 is -1; expected >= 0");
}

/// What view asks of an mdspan: C++23's has it, Kokkos's too.
template <typename T, std::size_t kRank>
struct Mdspan {
  struct Extents {
    std::array<int, kRank> values{};
    static constexpr std::size_t rank() { return kRank; }
    int extent(std::size_t dim) const { return values[dim]; }
  };
  const Extents& extents() const { return shape; }
  int stride(std::size_t dim) const { return strides[dim]; }
  T* data_handle() const { return data; }

  T* data = nullptr;
  Extents shape{};
  std::array<int, kRank> strides{};
};

TEST(View, OfAnMdspanHasItsShapeAndStrides) {
  std::array<std::int32_t, 12> data{};
  const Mdspan<std::int32_t, 3> transposed{data.data(), {{2, 3, 2}}, {1, 4, 2}};
  const TensorView tensor = view(transposed);
  EXPECT_EQ(to_string(tensor.spec()), "i32 [2, 3, 2] strides [1, 4, 2]");
  EXPECT_EQ(tensor.data(), data.data());
  EXPECT_TRUE(tensor.is_mutable());
  const Mdspan<const std::int32_t, 1> list{data.data(), {{12}}, {1}};
  EXPECT_FALSE(view(list).is_mutable());
}

}  // namespace
}  // namespace fovea
