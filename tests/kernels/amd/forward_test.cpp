// The f32 kernel with warps of 64 lanes, as CDNA has them, on the feature matrix and over caches, against the oracle.
// It copies nothing asynchronously, so one order of its threads is taken for each case.
#include "problem/forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/emulation_steps.hpp"
#include "kernels/forward_cases.hpp"
#include "kernels/run.hpp"
#include "support/kernel_compare.hpp"

namespace fovea::testing {
namespace {

cuda::DeviceTraits device_of_64_lanes() { return cuda::typical_amd_device(0x942); }

struct EmulationOf64Lanes : Emulation {
  EmulationOf64Lanes() {
    options.seed = 1;
    warp_lanes = 64;
  }
};

void run_on_amd(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = cuda::choose_forward(run.problem, run.device);
  ASSERT_EQ(plan.candidate, "cuda/sm80/attention_forward_f32");
  ASSERT_EQ(plan.spec->num_warps * 64, 4 * plan.spec->tile_q);
  start(run, emulation);
  void* const workspace = emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  cuda::ForwardLaunch call =
      cuda::forward_launch(run.problem, plan, run.args, workspace, run.cache);
  launch_forward(run, plan, call, emulation);
  emulation.expect_launched(call.launches(plan));
}

void expect_equals_oracle(const Case& problem) {
  EmulationOf64Lanes emulation;
  expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
    run_args(run_on_amd, problem.label, args, device_of_64_lanes(), emulation);
  });
  EXPECT_EQ(emulation.findings, "");
}

class SixtyFourLanes : public ::testing::TestWithParam<Case> {};

TEST_P(SixtyFourLanes, EqualTheOracle) { expect_equals_oracle(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, SixtyFourLanes, ::testing::ValuesIn(amd_cases()),
                         [](const auto& each) { return each.param.label; });

/// One more than a warp has lanes, which count sequences.
TEST(PackedRowsOf64Lanes, AreFoundBehindThoseOfAWarp) {
  const std::vector<Case> cases = amd_cases();
  Case problem = *std::ranges::find(cases, "packed_many_f32", &Case::label);
  problem.sequences = many_sequences(65);
  expect_equals_oracle(problem);
}

class CachesOfSixtyFourLanes : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(CachesOfSixtyFourLanes, EqualTheOracle) {
  const CacheCase& problem = GetParam().problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  const CacheCall call(problem, decode);
  if (problem.appends()) append_to_cache({.cache = decode.cache, .append = call.append});
  EmulationOf64Lanes emulation;
  run_on_amd(call.on(GetParam().label, device_of_64_lanes()), emulation);
  EXPECT_EQ(emulation.findings, "");
  expect_sequences_equal_oracle(problem, memory, decode);
}

INSTANTIATE_TEST_SUITE_P(All, CachesOfSixtyFourLanes, ::testing::ValuesIn(amd_cache_cases()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
