// The merge kernel under the emulator is the formula in fp64, for any dtypes and strides, and writes nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/error.hpp"
#include "fovea/state.hpp"

#include "common/merge_states.cuh"
#include "cuda/emulator/emulator.hpp"
#include "cuda/merge/merge_states.hpp"
#include "reference/merge_states.hpp"
#include "support/compare.hpp"
#include "support/guarded_tensor.hpp"
#include "support/launch_memory.hpp"
#include "support/merge_case.hpp"

namespace fovea::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

void run_emulated(const MergeStates& args) {
  cuda::emulator::Device device;
  for (const TensorBytes& tensor : tensors_of_merge(args))
    device.register_buffer(tensor.name, tensor.begin, tensor.size);
  const cuda::MergeLaunch launch = cuda::merge_launch(args);
  if (launch.grid.x == 0) return;
  const cuda::emulator::Report report =
      device.launch({.grid = {static_cast<std::int32_t>(launch.grid.x), 1, 1},
                     .block = {static_cast<std::int32_t>(launch.num_threads), 1, 1}},
                    {}, [&] { cuda::merge_states(launch.params); });
  EXPECT_EQ(report.text(), "");
}

class EmulatedMerges : public ::testing::TestWithParam<MergeCase> {};

TEST_P(EmulatedMerges, AreTheFormula) {
  MergeMemory memory(GetParam());
  const reference::MergedState expected = reference::merge_states(memory.args);
  run_emulated(memory.args);
  expect_merged(GetParam(), memory, expected.out, expected.lse);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedMerges, ::testing::ValuesIn(merge_cases()),
                         [](const auto& each) { return each.param.name; });

/// One row of two elements: out and lse of states that a person can check.
struct Row {
  double x = 0, y = 0, lse = -kInfinity;
};

std::vector<double> merge(const std::vector<Row>& rows) {
  std::vector<GuardedTensor> tensors;
  MergeStates args;
  for (const Row& row : rows) {
    tensors.push_back(tensor_of(Dtype::f32, {1, 1, 1, 2}, {row.x, row.y}));
    args.outs.push_back(tensors.back().view());
    tensors.push_back(tensor_of(Dtype::f32, {1, 1, 1}, {row.lse}));
    args.lses.push_back(tensors.back().view());
  }
  GuardedTensor out = tensor_of(Dtype::f32, {1, 1, 1, 2}, {kNan, kNan});
  GuardedTensor lse = tensor_of(Dtype::f32, {1, 1, 1}, {kNan});
  args.out = out.mutable_view();
  args.lse = lse.mutable_view();
  run_emulated(args);
  const std::vector<double> values = values_of(out.view());
  return {values[0], values[1], values_of(lse.view())[0]};
}

TEST(EmulatedMerge, InfinityAndNanCountAsOnTheCpu) {
  EXPECT_EQ(merge({{1, 2, -3000}, {3, 4, 3000}, {5, 6, 2000}}), (std::vector<double>{3, 4, 3000}));
  EXPECT_EQ(merge({{kNan, 7, -kInfinity}, {kInfinity, 7, -kInfinity}}),
            (std::vector<double>{0, 0, -kInfinity}));
  // Infinity outlives a weight that rounds to 0, and a state that saw no key does not count.
  EXPECT_EQ(merge({{kInfinity, 5, -3000}, {3, 4, 0}, {kNan, kNan, -kInfinity}}),
            (std::vector<double>{kInfinity, 4, 0}));
  EXPECT_EQ(merge({{3, 4, 0}, {kInfinity, 5, -3000}}), (std::vector<double>{kInfinity, 4, 0}));
  EXPECT_EQ(merge({{1, kInfinity, 2}, {3, 4, kInfinity}}),
            (std::vector<double>{3, kInfinity, kInfinity}));
  EXPECT_EQ(merge({{1, 2, kInfinity}, {3, 4, kInfinity}}), (std::vector<double>{2, 3, kInfinity}));
  EXPECT_TRUE(std::signbit(merge({{-0.0, 1, 0.5}})[0])) << "one state is copied";
  for (const double value : merge({{1, 2, kNan}, {3, 4, 0}})) EXPECT_TRUE(std::isnan(value));
  EXPECT_TRUE(std::isnan(merge({{1, kNan, 0}, {2, 3, 0}})[1]));
}

TEST(MergeLaunch, MoreStatesThanLanesAreRefusedByName) {
  MergeMemory memory({.name = "", .num_states = 33, .batch = 1, .rows = 1, .heads = 1, .width = 4});
  try {
    cuda::merge_launch(memory.args);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(),
                 "merge_states: 33 states; expected at most 32 on a GPU: merge some of them first");
  }
}

}  // namespace
}  // namespace fovea::testing
