// The kernel that adds and copies tensors, under the emulator: sums in f32 in the order of the parts, any dtypes and
// strides, and nothing else is written.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "fovea/error.hpp"

#include "common/sum_parts.cuh"
#include "core/scalar_io.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/sum/sum_parts.hpp"
#include "support/guarded_tensor.hpp"

namespace fovea::testing {
namespace {

using Shape = std::vector<std::int64_t>;

/// A tensor in memory with NaN around it and between its elements.
class Spread {
 public:
  Spread(Dtype dtype, const Shape& shape, const Shape& strides, std::int64_t offset = 8)
      : spec_(make_spec(dtype, shape, strides)), offset_(offset) {
    std::int64_t last = offset;
    for (std::size_t dim = 0; dim < shape.size(); ++dim) last += (shape[dim] - 1) * strides[dim];
    bytes_.resize(static_cast<std::size_t>(last + 9) * size_bytes(dtype), std::byte{0xff});
  }
  TensorView view() { return {static_cast<void*>(bytes_.data() + at(0)), spec_}; }

  /// body(row-major number, element) of each element.
  template <typename Body>
  void for_each(const Body& body) {
    const std::int64_t count = spec_.num_elements();
    for (std::int64_t number = 0; number < count; ++number) {
      std::int64_t rest = number, element = offset_;
      for (int dim = spec_.rank - 1; dim >= 0; --dim) {
        const auto i = static_cast<std::size_t>(dim);
        element += rest % spec_.shape[i] * spec_.strides[i];
        rest /= spec_.shape[i];
      }
      body(number, element);
    }
  }
  void fill(unsigned seed) {
    for_each([&](std::int64_t number, std::int64_t element) {
      // Of each dtype exactly, in no order that sums would not see.
      const auto value = static_cast<float>((number * 37 + seed * 101) % 255 - 127) / 16.0F;
      store_scalar(bytes_.data(), spec_.dtype, element, value);
    });
  }
  float value(std::int64_t element) const {
    return load_scalar(bytes_.data(), spec_.dtype, element);
  }
  /// Whether what lies between and around the elements is as it was.
  bool is_clean_around() {
    std::vector<bool> is_element(bytes_.size() / size_bytes(spec_.dtype));
    for_each([&](std::int64_t, std::int64_t element) {
      is_element[static_cast<std::size_t>(element)] = true;
    });
    for (std::size_t i = 0; i < is_element.size(); ++i) {
      for (std::size_t byte = 0; byte < size_bytes(spec_.dtype); ++byte) {
        if (!is_element[i] && bytes_[i * size_bytes(spec_.dtype) + byte] != std::byte{0xff})
          return false;
      }
    }
    return true;
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::size_t at(std::int64_t element) const {
    return static_cast<std::size_t>(element + offset_) * size_bytes(spec_.dtype);
  }

  TensorSpec spec_;
  std::int64_t offset_;
  std::vector<std::byte> bytes_;
};

using Places = std::vector<std::int32_t>;

void run_emulated(Spread& sum, std::vector<Spread>& parts, std::vector<Places> places = {},
                  cuda::Fold fold = cuda::Fold::sum) {
  cuda::emulator::Device device;
  device.register_buffer("sum", sum.bytes().data(), sum.bytes().size());
  std::vector<cuda::SumPart> views;
  for (Spread& part : parts) {
    device.register_buffer("part " + std::to_string(views.size()), part.bytes().data(),
                           part.bytes().size());
    views.push_back({part.view()});
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (places[i].empty()) continue;  // index for index
    device.register_buffer("places " + std::to_string(i), places[i].data(),
                           places[i].size() * sizeof(std::int32_t));
    views[i].places = view(places[i].data(), {static_cast<std::int64_t>(places[i].size())});
  }
  const cuda::SumLaunch launch = cuda::sum_launch(sum.view(), views, fold);
  const cuda::emulator::Report report =
      device.launch({.grid = {static_cast<std::int32_t>(launch.grid.x), 1, 1},
                     .block = {static_cast<std::int32_t>(launch.num_threads), 1, 1}},
                    {}, [&] { cuda::sum_parts(launch.params); });
  EXPECT_EQ(report.text(), "");
}

/// How a tensor lies: elements between neighbours along each dimension, of a shape.
Shape packed_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t dim = shape.size() - 1; dim-- > 0;)
    strides[dim] = strides[dim + 1] * shape[dim + 1];
  return strides;
}
/// Rows with a gap behind them, so that dimensions do not follow each other.
Shape gapped_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t dim = shape.size() - 1; dim-- > 0;)
    strides[dim] = strides[dim + 1] * shape[dim + 1] + 8;
  return strides;
}
/// The last dimension is not contiguous.
Shape strided_columns(const Shape& shape) {
  Shape strides = packed_strides(shape);
  for (std::int64_t& stride : strides) stride *= 2;
  return strides;
}

struct SumCase {
  std::string name;
  Shape shape;
  Dtype sum = Dtype::f32;
  std::vector<Dtype> parts{Dtype::f32};
  Shape (*sum_strides)(const Shape&) = packed_strides;
  Shape (*part_strides)(const Shape&) = packed_strides;
  std::int64_t offset = 8;  // of every tensor, in elements
};

void PrintTo(const SumCase& c, std::ostream* out) { *out << c.name; }

class EmulatedSums : public ::testing::TestWithParam<SumCase> {};

TEST_P(EmulatedSums, AreThoseOfF32InTheOrderOfTheParts) {
  const SumCase& c = GetParam();
  Spread sum(c.sum, c.shape, c.sum_strides(c.shape), c.offset);
  std::vector<Spread> parts;
  for (const Dtype dtype : c.parts) {
    parts.emplace_back(dtype, c.shape, c.part_strides(c.shape), c.offset);
    parts.back().fill(static_cast<unsigned>(parts.size()));
  }
  std::vector<float> expected(static_cast<std::size_t>(sum.view().spec().num_elements()));
  for (Spread& part : parts) {
    part.for_each([&](std::int64_t number, std::int64_t element) {
      expected[static_cast<std::size_t>(number)] += part.value(element);
    });
  }
  run_emulated(sum, parts);
  sum.for_each([&](std::int64_t number, std::int64_t element) {
    float rounded = expected[static_cast<std::size_t>(number)];
    std::array<std::byte, 4> stored{};
    store_scalar(stored.data(), c.sum, 0, rounded);
    rounded = load_scalar(stored.data(), c.sum, 0);
    ASSERT_EQ(sum.value(element), rounded) << "element " << number;
  });
  EXPECT_TRUE(sum.is_clean_around());
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedSums,
    ::testing::Values(
        // Aligned rows, four columns a lane; what is left behind 128, and behind a multiple of four.
        SumCase{"copy_of_bf16",
                {3, 2, 2, 136},
                Dtype::bf16,
                {Dtype::bf16},
                packed_strides,
                gapped_strides},
        SumCase{
            "copy_of_f16", {3, 2, 2, 24}, Dtype::f16, {Dtype::f16}, gapped_strides, packed_strides},
        SumCase{"f32_to_bf16",
                {2, 3, 4, 64},
                Dtype::bf16,
                {Dtype::f32},
                gapped_strides,
                gapped_strides},
        SumCase{"sum_of_two", {5, 1, 3, 20}, Dtype::f32, {Dtype::f32, Dtype::f32}},
        SumCase{"sum_of_five_rounded",
                {2, 2, 3, 16},
                Dtype::f16,
                std::vector(5, Dtype::f32),
                gapped_strides},
        SumCase{"sum_of_all_parts",
                {1, 3, 1, 7},
                Dtype::f32,
                std::vector<Dtype>(cuda::kMostSummedParts, Dtype::f32)},
        SumCase{"sum_of_none", {2, 2, 2, 9}, Dtype::f32, {}, gapped_strides},
        SumCase{"strided_columns",
                {2, 3, 2, 10},
                Dtype::bf16,
                {Dtype::f32, Dtype::bf16},
                strided_columns,
                strided_columns},
        SumCase{"unaligned",
                {2, 3, 2, 16},
                Dtype::bf16,
                {Dtype::bf16},
                gapped_strides,
                gapped_strides,
                3},
        // Of other ranks: lse, sinks, a table; dimensions that follow each other are one of many pieces.
        SumCase{"rank_3", {6, 2, 3}, Dtype::f32, {Dtype::f32}, packed_strides, strided_columns},
        SumCase{"rank_1", {5}, Dtype::f32, {Dtype::f32, Dtype::f32}},
        SumCase{"rank_6", {2, 3, 2, 2, 3, 40}, Dtype::f32, {Dtype::f32, Dtype::f32}},
        SumCase{"one_element", {1, 1, 1, 1}, Dtype::bf16, {Dtype::f32}}),
    [](const auto& each) { return each.param.name; });

/// Rows of parts by places in them, of which some are nowhere: what ranks pack, put in order and sum.
struct PlacedCase {
  std::string name;
  Shape shape;  // of the sum
  Dtype dtype = Dtype::bf16;
  std::vector<Places> places{};
  std::int64_t num_rows = 5;  // of parts with places
  Shape (*strides)(const Shape&) = packed_strides;
};

void PrintTo(const PlacedCase& c, std::ostream* out) { *out << c.name; }

class EmulatedPlacedSums : public ::testing::TestWithParam<PlacedCase> {};

TEST_P(EmulatedPlacedSums, AddWhatStandsAtThePlacesOfEachPart) {
  const PlacedCase& c = GetParam();
  Spread sum(c.dtype, c.shape, c.strides(c.shape));
  const std::int64_t per_row = sum.view().spec().num_elements() / c.shape[0];
  std::vector<Spread> parts;
  std::vector<float> expected(static_cast<std::size_t>(sum.view().spec().num_elements()));
  for (const Places& places : c.places) {
    Shape shape = c.shape;
    if (!places.empty()) shape[0] = c.num_rows;
    Spread& part = parts.emplace_back(c.dtype, shape, c.strides(shape));
    part.fill(static_cast<unsigned>(parts.size()));
    std::vector<float> values;
    part.for_each([&](std::int64_t, std::int64_t at) { values.push_back(part.value(at)); });
    for (std::int64_t i = 0; i < c.shape[0]; ++i) {
      const std::int64_t row = places.empty() ? i : places[static_cast<std::size_t>(i)];
      for (std::int64_t j = 0; row >= 0 && j < per_row; ++j)
        expected[static_cast<std::size_t>(i * per_row + j)] +=
            values[static_cast<std::size_t>(row * per_row + j)];
    }
  }
  run_emulated(sum, parts, c.places);
  sum.for_each([&](std::int64_t number, std::int64_t element) {
    std::array<std::byte, 4> stored{};
    store_scalar(stored.data(), c.dtype, 0, expected[static_cast<std::size_t>(number)]);
    ASSERT_EQ(sum.value(element), load_scalar(stored.data(), c.dtype, 0)) << "element " << number;
  });
  EXPECT_TRUE(sum.is_clean_around());
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedPlacedSums,
    ::testing::Values(
        PlacedCase{"permuted", {5, 2, 3, 40}, Dtype::bf16, {{3, 0, 4, 1, 2}}},
        PlacedCase{"repeated_and_missing", {4, 1, 2, 24}, Dtype::f16, {{4, -1, 4, 0}}},
        PlacedCase{"one_of_two", {4, 2, 2, 16}, Dtype::bf16, {{0, -1, 2, -1}, {-1, 1, -1, 0}}},
        PlacedCase{"sums",
                   {3, 1, 2, 136},
                   Dtype::f32,
                   {{}, {-1, 2, 1}, {4, -1, -1}, {0, 0, -1}, {-1, 3, -1}}},
        PlacedCase{"nowhere", {3, 2, 1, 8}, Dtype::f32, {{-1, -1, -1}, {-1, -1, -1}}},
        // The first dimension stays by itself, whether neighbours follow it or there is one of it.
        PlacedCase{"rows_with_gaps", {4, 2, 2, 20}, Dtype::bf16, {{1, 3, 0, 2}}, 5, gapped_strides},
        PlacedCase{"rank_2", {6, 9}, Dtype::f32, {{5, 4, -1, 2, 1, 0}}, 6},
        PlacedCase{"rank_3_of_ones", {3, 1, 1}, Dtype::f32, {{2, 1, 0}}},
        PlacedCase{"one_row", {1, 2, 2, 8}, Dtype::bf16, {{4}}}),
    [](const auto& each) { return each.param.name; });

TEST(EmulatedSum, OnePartIsCopiedWithItsSignOfZero) {
  Spread sum(Dtype::f32, {2}, {1});
  std::vector<Spread> parts;
  parts.emplace_back(Dtype::f32, Shape{2}, Shape{1});
  store_scalar(parts[0].bytes().data(), Dtype::f32, 8, -0.0F);
  store_scalar(parts[0].bytes().data(), Dtype::f32, 9, INFINITY);
  run_emulated(sum, parts);
  EXPECT_TRUE(std::signbit(sum.value(8)));
  EXPECT_EQ(sum.value(9), INFINITY);
}

TEST(EmulatedSum, TheLargestOfPartsIsNanWhereOneIs) {
  Spread largest(Dtype::f32, {4}, {1});
  std::vector<Spread> parts;
  const std::array<std::array<float, 4>, 3> values{
      {{1, -INFINITY, 5, 2}, {3, -INFINITY, NAN, -4}, {2, -INFINITY, 7, 1}}};
  for (const auto& of_part : values) {
    Spread& part = parts.emplace_back(Dtype::f32, Shape{4}, Shape{1});
    for (std::size_t i = 0; i < 4; ++i)
      store_scalar(part.bytes().data(), Dtype::f32, static_cast<std::int64_t>(8 + i), of_part[i]);
  }
  run_emulated(largest, parts, {}, cuda::Fold::largest);
  EXPECT_EQ(largest.value(8), 3);
  EXPECT_EQ(largest.value(9), -INFINITY);
  EXPECT_TRUE(std::isnan(largest.value(10)));
  EXPECT_EQ(largest.value(11), 2);
}

TEST(SumLaunch, MoreThanFourDimensionsThatDoNotFollowEachOtherAreRefused) {
  const Shape shape{2, 2, 2, 2, 2};
  Spread sum(Dtype::f32, shape, gapped_strides(shape));
  try {
    cuda::sum_launch(sum.view(), {});
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("more than four dimensions"), std::string::npos);
  }
}

/// No dimension may count past 32 bits, though all of them follow each other: 2^32 elements of no memory.
TEST(SumLaunch, DimensionsOfLargeTensorsStayApart) {
  const TensorSpec spec = make_spec(Dtype::bf16, Shape{1 << 20, 1, 32, 128});
  const TensorView large(static_cast<void*>(nullptr), spec);
  const cuda::SumLaunch launch = cuda::sum_launch(large, std::vector{cuda::SumPart{large}});
  EXPECT_EQ(launch.params.num_rows * launch.params.num_columns, std::int64_t{1} << 32);
}

}  // namespace
}  // namespace fovea::testing
