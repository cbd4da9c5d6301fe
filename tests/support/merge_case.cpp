#include "support/merge_case.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "support/compare.hpp"
#include "support/drawn_spec.hpp"
#include "support/random.hpp"

namespace fovea::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Weights are rounded once, each of `terms` products and sums once, the result to its dtype.
double allowed(double value, Dtype dtype, std::size_t terms) {
  const double rounding = dtype == Dtype::f32 ? 0x1p-24 : dtype == Dtype::f16 ? 0x1p-11 : 0x1p-8;
  return rounding * std::abs(value) + static_cast<double>(terms + 8) * 0x1p-22;
}

void expect_near(const TensorView& got, const std::vector<double>& expected, std::size_t terms) {
  const std::vector<double> values = values_of(got);
  ASSERT_EQ(values.size(), expected.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
    } else {
      EXPECT_TRUE(values[i] == expected[i] ||
                  std::abs(values[i] - expected[i]) <= allowed(expected[i], got.dtype(), terms))
          << i << ": got " << values[i] << ", expected " << expected[i];
    }
  }
}

}  // namespace

std::vector<MergeCase> merge_cases() {
  const std::vector<Dtype> all = {Dtype::f32, Dtype::bf16, Dtype::f16};
  return {
      {.name = "f32"},
      {.name = "one_state", .num_states = 1},
      {.name = "no_states", .num_states = 0},
      {.name = "a_state_for_each_lane", .num_states = 32, .rows = 3, .heads = 2, .width = 8},
      {.name = "bf16", .dtypes = {Dtype::bf16}, .out_dtype = Dtype::bf16},
      {.name = "mixed_dtypes", .dtypes = all, .out_dtype = Dtype::f16},
      {.name = "packed", .rows = 7, .dtypes = all, .is_packed = true},
      {.name = "strided", .dtypes = all, .has_drawn_strides = true},
      {.name = "strided_packed", .dtypes = all, .is_packed = true, .has_drawn_strides = true},
      {.name = "in_place", .is_in_place = true},
      {.name = "in_place_strided_bf16",
       .dtypes = {Dtype::bf16},
       .has_drawn_strides = true,
       .is_in_place = true},
      {.name = "without_lse", .has_lse = false},
      {.name = "width_1", .width = 1},                     // no lane has four columns
      {.name = "width_127", .width = 127, .dtypes = all},  // a warp's columns but one
      {.name = "width_129", .width = 129, .dtypes = all},  // and one more
      {.name = "width_512", .rows = 2, .width = 512, .dtypes = all},
      {.name = "no_columns", .width = 0},
      {.name = "no_rows", .rows = 0},
  };
}

MergeMemory::MergeMemory(const MergeCase& c) {
  const std::vector<std::int64_t> shape = c.is_packed
                                              ? std::vector{c.rows, c.heads, c.width}
                                              : std::vector{c.batch, c.rows, c.heads, c.width};
  const std::vector<std::int64_t> lse_shape =
      c.is_packed ? std::vector{c.heads, c.rows} : std::vector{c.batch, c.heads, c.rows};
  const auto tensor = [&](Dtype dtype, const std::vector<std::int64_t>& extents,
                          std::uint64_t stream, Strides strides) {
    return GuardedTensor(c.has_drawn_strides
                             ? drawn_spec(dtype, extents, Random(3, stream), strides)
                             : make_spec(dtype, extents));
  };
  for (int i = 0; i < c.num_states; ++i) {
    const auto stream = static_cast<std::uint64_t>(10 * i);
    const Random random(7, stream);
    const Strides strides = c.is_in_place ? Strides::of_output : Strides::of_input;
    lses.push_back(tensor(Dtype::f32, lse_shape, stream + 1, strides));
    lses.back().fill([&](std::int64_t at) {
      return random.below(5, at) == 0 ? -kInfinity : 30 * random.normal(at);
    });
    outs.push_back(tensor(c.dtypes[static_cast<std::size_t>(i) % c.dtypes.size()], shape,
                          stream + 2, strides));
    const std::vector<double> weights = values_of(lses.back().view());
    outs.back().fill([&](std::int64_t at) {
      const std::int64_t head = at / c.width % c.heads, row = at / c.width / c.heads % c.rows;
      const std::int64_t batch = at / c.width / c.heads / c.rows;
      const auto of_row = static_cast<std::size_t>((batch * c.heads + head) * c.rows + row);
      return weights[of_row] == -kInfinity ? kNan : random.normal(at + 1000);
    });
    args.outs.push_back(outs.back().view());
    args.lses.push_back(lses.back().view());
  }
  if (c.is_in_place) {
    args.out = outs[0].mutable_view();
    args.lse = lses[0].mutable_view();
  } else {
    out = tensor(c.out_dtype, shape, 901, Strides::of_output);
    lse = tensor(Dtype::f32, lse_shape, 902, Strides::of_output);
    out.poison();
    lse.poison();
    args.out = out.mutable_view();
    if (c.has_lse) args.lse = lse.mutable_view();
  }
  for (std::vector<GuardedTensor>* tensors : {&outs, &lses})
    for (GuardedTensor& each : *tensors) each.seal();
  out.seal();
  lse.seal();
}

void expect_merged(const MergeCase& c, const MergeMemory& memory,
                   const std::vector<double>& expected_out,
                   const std::vector<double>& expected_lse) {
  expect_near(memory.args.out, expected_out, memory.args.outs.size());
  if (memory.args.lse) expect_near(memory.args.lse, expected_lse, 64);  // lse of some tens
  for (std::size_t i = 0; i < memory.outs.size(); ++i) {
    const bool is_written = c.is_in_place && i == 0;
    EXPECT_TRUE(is_written ? memory.outs[i].has_intact_guards() : memory.outs[i].is_unchanged());
    EXPECT_TRUE(is_written ? memory.lses[i].has_intact_guards() : memory.lses[i].is_unchanged());
  }
  if (c.is_in_place) return;
  EXPECT_TRUE(memory.out.has_intact_guards());
  EXPECT_TRUE(c.has_lse ? memory.lse.has_intact_guards() : memory.lse.is_unchanged());
}

}  // namespace fovea::testing
