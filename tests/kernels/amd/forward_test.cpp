// Kernels with warps of 64 lanes, as CDNA has them, on the feature matrix and over caches, against the oracle. The f32
// kernel copies nothing asynchronously, so one order of its threads is taken for each case.
#include "problem/forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/forward/cdna.hpp"
#include "kernels/emulation_steps.hpp"
#include "kernels/forward_cases.hpp"
#include "kernels/run.hpp"
#include "support/kernel_compare.hpp"
#include "support/long_run.hpp"

namespace fovea::testing {
namespace {

constexpr const char* kF32 = "cuda/sm80/attention_forward_f32";
constexpr const char* kCdna = "cuda/cdna/attention_forward";

struct EmulationOf64Lanes : Emulation {
  explicit EmulationOf64Lanes(const std::string& label, cuda::emulator::Options how = {.seed = 1}) {
    options = how;
    warp_lanes = 64;
    gfx = amd_device_of(label).gfx;
  }
};

void run_on_amd(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = cuda::choose_forward(run.problem, run.device);
  start(run, emulation);
  void* const workspace = emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  cuda::ForwardLaunch call =
      cuda::forward_launch(run.problem, plan, run.args, workspace, run.cache);
  launch_forward(run, plan, call, emulation);
  emulation.expect_launched(call.launches(plan));
}

void run_f32(const Run& run, Emulation& emulation) {
  const cuda::ForwardPlan plan = cuda::choose_forward(run.problem, run.device);
  ASSERT_EQ(plan.candidate, kF32);
  ASSERT_EQ(plan.spec->num_warps * 64, 4 * plan.spec->tile_q);
  run_on_amd(run, emulation);
}

void run_cdna(const Run& run, Emulation& emulation) {
  ASSERT_EQ(cuda::choose_forward(run.problem, run.device).candidate, kCdna);
  ASSERT_TRUE(cuda::CdnaForward::reads(run.args, run.cache));
  run_on_amd(run, emulation);
}

void expect_equals_oracle(Runner run, const Case& problem,
                          cuda::emulator::Options how = {.seed = 1}) {
  EmulationOf64Lanes emulation(problem.label, how);
  expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
    run_args(run, problem.label, args, amd_device_of(problem.label), emulation);
  });
  EXPECT_EQ(emulation.findings, "");
}

void expect_equals_oracle(Runner run, const NamedCacheCase& each) {
  const CacheCase& problem = each.problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  const CacheCall call(problem, decode);
  if (problem.appends()) append_to_cache({.cache = decode.cache, .append = call.append});
  EmulationOf64Lanes emulation(each.label);
  run(call.on(each.label, amd_device_of(each.label)), emulation);
  EXPECT_EQ(emulation.findings, "");
  expect_sequences_equal_oracle(problem, memory, decode);
}

class SixtyFourLanes : public ::testing::TestWithParam<Case> {};

TEST_P(SixtyFourLanes, EqualTheOracle) { expect_equals_oracle(run_f32, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, SixtyFourLanes, ::testing::ValuesIn(amd_cases()),
                         [](const auto& each) { return each.param.label; });

/// One more than a warp has lanes, which count sequences.
TEST(PackedRowsOf64Lanes, AreFoundBehindThoseOfAWarp) {
  const std::vector<Case> cases = amd_cases();
  Case problem = *std::ranges::find(cases, "packed_many_f32", &Case::label);
  problem.sequences = many_sequences(65);
  expect_equals_oracle(run_f32, problem);
}

class CachesOfSixtyFourLanes : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(CachesOfSixtyFourLanes, EqualTheOracle) { expect_equals_oracle(run_f32, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, CachesOfSixtyFourLanes, ::testing::ValuesIn(amd_cache_cases()),
                         [](const auto& each) { return each.param.label; });

class Cdna : public ::testing::TestWithParam<Case> {};

TEST_P(Cdna, EqualsTheOracle) { expect_equals_oracle(run_cdna, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Cdna, ::testing::ValuesIn(cdna_cases()),
                         [](const auto& each) { return each.param.label; });

/// Copies that land when they are issued, when they are waited for, and at moments in between.
TEST(CdnaLandings, GiveTheSame) {
  using cuda::emulator::Landing;
  const std::vector<Case> cases = cdna_cases();
  for (const char* const label : {"cdna_d128", "gfx950_d128", "gfx950_d64"}) {
    SCOPED_TRACE(label);
    const Case& problem = *std::ranges::find(cases, label, &Case::label);
    for (const Landing landing : {Landing::earliest, Landing::latest})
      expect_equals_oracle(run_cdna, problem, {.seed = 0, .landing = landing});
    expect_equals_oracle(run_cdna, problem, {.seed = first_seed() + 2});
  }
}

class CachesOfCdna : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(CachesOfCdna, EqualTheOracle) { expect_equals_oracle(run_cdna, GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, CachesOfCdna, ::testing::ValuesIn(cdna_cache_cases()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
