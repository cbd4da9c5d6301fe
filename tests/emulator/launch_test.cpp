// A launch as a whole: seeds that replay, what ends it, memory between CTAs, speed of one tile.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "fovea/error.hpp"

#include "cuda/emulator/emulator.hpp"
#include "emulator/guests/attention_problem.hpp"
#include "emulator/guests/attention_sm80.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/fence.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::emulator {
namespace {

using testing::HasSubstr;

Report run_with_fault(const Options& options) {
  const AttentionProblem problem(64, 70, 64);
  Device device;
  const guest80::Params params{.q = device.buffer("q", problem.q),
                               .k = device.buffer("k", problem.k),
                               .v = device.buffer("v", problem.v),
                               .out = device.buffer<float>("out", 64 * 64),
                               .k_row_stride = 64,
                               .seqlen_kv = 70,
                               .softmax_scale_log2 = 1};
  const LaunchConfig config{.block = {guest80::kThreads, 1, 1},
                            .shared_bytes = guest80::kSharedBytes};
  return device.launch(config, options, [&] {
    guest80::attention<guest80::Planted::barrier_before_reuse_missing>(params);
  });
}

TEST(Launch, SeedReplaysExactly) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const Report first = run_with_fault({.seed = seed}), second = run_with_fault({.seed = seed});
    EXPECT_EQ(first.text(), second.text());
    EXPECT_EQ(first.switches, second.switches);
  }
}

TEST(Launch, SeedsDiffer) {
  EXPECT_NE(run_with_fault({.seed = 1}).text(), run_with_fault({.seed = 2}).text());
}

TEST(Launch, FindingNamesThreadInstructionAndLine) {
  const std::string text = run_with_fault({}).text();
  EXPECT_THAT(text, HasSubstr("race: cta (0,0,0) thread "));
  EXPECT_THAT(text, HasSubstr("cp.async"));
  EXPECT_THAT(text, HasSubstr("[attention_sm80.cuh:"));
  EXPECT_THAT(text, HasSubstr("replay with Options{.seed = 0, .landing = Landing::seeded}"));
}

/// The last CTA to come adds what all of them wrote.
template <class Add>
Report run_last_arriver(const Add& add, bool has_fences) {
  constexpr int kCtas = 4;
  Device device;
  auto* partial = device.buffer<int>("partial", kCtas * 32);
  auto* counter = device.buffer("counter", std::vector<std::int32_t>{0});
  auto* out = device.buffer<int>("out", 32);
  const Report report =
      device.launch({.grid = {kCtas, 1, 1}, .block = {32, 1, 1}, .shared_bytes = 16}, {}, [&] {
        const int lane = ptx::lane_idx();
        ptx::st_global(partial + ptx::block_idx().x * 32 + lane, lane);
        ptx::sync_threads();
        if (lane == 0) {
          if (has_fences) ptx::fence_acq_rel_gpu();
          const int before = add(counter);
          if (has_fences) ptx::fence_acq_rel_gpu();
          ptx::st_shared(ptx::dynamic_shared(), before);
        }
        ptx::sync_threads();
        if (ptx::ld_shared<int>(ptx::dynamic_shared()) != kCtas - 1) return;
        int sum = 0;
        for (int cta = 0; cta < kCtas; ++cta) sum += ptx::ld_global(partial + cta * 32 + lane);
        ptx::st_global(out + lane, sum);
      });
  EXPECT_EQ(out[5], 20);
  return report;
}

TEST(Launch, LastCtaSeesWhatAtomicsRelease) {
  const auto relaxed = [](std::int32_t* to) { return ptx::atom_add_global(to, 1); };
  const auto acq_rel = [](std::int32_t* to) { return ptx::atom_add_acq_rel_global(to, 1); };
  EXPECT_EQ(run_last_arriver(acq_rel, false).text(), "");
  EXPECT_EQ(run_last_arriver(relaxed, true).text(), "");
  EXPECT_TRUE(run_last_arriver(relaxed, false).has(Fault::race))
      << "a relaxed atomic orders nothing";
}

TEST(Launch, ReadOnlyPathToWhatTheGridWritesIsNamed) {
  Device device;
  auto* data = device.buffer("data", std::vector<int>(32));
  const auto launch = [&](bool writes) {
    return device.launch({.block = {32, 1, 1}}, {}, [&] {
      const int lane = ptx::lane_idx();
      if (writes) ptx::st_global(data + lane, lane);
      ptx::sync_warp();
      ptx::ld_global_nc(data + (lane ^ 1));
    });
  };
  EXPECT_TRUE(launch(true).has(Fault::non_coherent_read));
  EXPECT_EQ(launch(false).text(), "") << "what an earlier launch wrote is there";
}

TEST(Launch, ConfigurationThatNoGpuTakesIsRefused) {
  Device device;
  const auto launch = [&](const LaunchConfig& config) { device.launch(config, {}, [] {}); };
  EXPECT_THROW(launch({.block = {1056, 1, 1}}), InvalidArgument);
  EXPECT_THROW(launch({.block = {48, 1, 1}, .warp_lanes = 48}), InvalidArgument);
  EXPECT_THROW(launch({.block = {32, 1, 1}, .shared_bytes = 232449}), InvalidArgument);
  EXPECT_THROW(launch({.grid = {3, 1, 1}, .block = {32, 1, 1}, .cluster = {2, 1, 1}}),
               InvalidArgument);
}

TEST(Launch, TrapEndsTheGrid) {
  Device device;
  auto* out = device.buffer<int>("out", 64);
  const Report report = device.launch({.grid = {2, 1, 1}, .block = {32, 1, 1}}, {}, [&] {
    if (ptx::lane_idx() == 3) ptx::trap();
    ptx::sync_warp();
    ptx::st_global(out + ptx::lane_idx(), 1);
  });
  EXPECT_TRUE(report.has(Fault::trap));
  EXPECT_EQ(out[0], -1);
}

TEST(Launch, OverrunOfABufferDoesNotReachTheNextOne) {
  Device device;
  int* out = device.buffer<int>("out", 32);
  const Report report = device.launch({.block = {32, 1, 1}}, {}, [&] {
    ptx::st_global(out + ptx::lane_idx() + 1, ptx::lane_idx());
  });
  EXPECT_THAT(report.text(), HasSubstr("out of bounds: cta (0,0,0) thread 31"));
  EXPECT_THAT(report.text(), HasSubstr("out+128 of 128 bytes"));
}

TEST(Launch, CtasThatWaitForEachOtherRunTogether) {
  Device device;
  auto* flag = device.buffer("flag", std::vector<std::int32_t>{0});
  // CTA 0 polls for what CTA 1 adds.
  const LaunchConfig config{.grid = {2, 1, 1}, .block = {1, 1, 1}, .clusters_at_once = 2};
  const Report report = sweep(5, [&](const Options& options) {
    *flag = 0;
    return device.launch(config, options, [&] {
      if (ptx::block_idx().x == 1) ptx::atom_add_acq_rel_global(flag, 1);
      while (ptx::block_idx().x == 0 && ptx::atom_add_acq_rel_global(flag, 0) == 0) continue;
    });
  });
  EXPECT_EQ(report.text(), "");
}

/// A copy that lands late is what the other CTA waits for, before it answers.
TEST(Launch, PollIsAnsweredByWhoWaitsForACopy) {
  Device device;
  const auto* in = device.buffer("in", std::vector<int>(64, 5));
  auto* flag = device.buffer("flag", std::vector<std::int32_t>{0});
  auto* out = device.buffer("out", std::vector<std::int32_t>{0});
  const LaunchConfig config{
      .grid = {2, 1, 1}, .block = {1, 1, 1}, .shared_bytes = 1024, .clusters_at_once = 2};
  const auto run = [&](const Options& options, bool is_released) {
    *flag = 0;
    return device.launch(config, options, [&] {
      const ptx::SharedAddress data = ptx::dynamic_shared();
      if (ptx::block_idx().x == 1) {
        ptx::mbarrier_init(data + 512, 1);
        ptx::fence_mbarrier_init_release_cluster();
        ptx::mbarrier_arrive_expect_tx(data + 512, 256);
        ptx::cp_async_bulk_load(data, in, 256, data + 512, ptx::CachePolicy::evict_normal);
        ptx::mbarrier_wait_parity(data + 512, 0);
        ptx::st_global(out, ptx::ld_shared<int>(data + 8));
        if (is_released) ptx::red_add_release_global(flag, 1);
        if (!is_released) ptx::atom_add_global(flag, 1);
      } else {
        while (ptx::ld_acquire_global(flag) == 0) continue;
        ptx::st_global(out, ptx::ld_global(out) + 1);
      }
    });
  };
  EXPECT_EQ(sweep(5, [&](const Options& options) { return run(options, true); }).text(), "");
  EXPECT_EQ(*out, 6);
  EXPECT_TRUE(run({}, false).has(Fault::race)) << "the word was not released";
}

TEST(Launch, PollThatNobodyAnswersIsALivelock) {
  Device device;
  auto* flag = device.buffer("flag", std::vector<std::int32_t>{0});
  const Report report = device.launch({.block = {1, 1, 1}}, {}, [&] {
    while (ptx::atom_add_global(flag, 0) == 0) continue;
  });
  EXPECT_TRUE(report.has(Fault::livelock)) << report.text();
}

TEST(Launch, TurnsThatHaveNoEndAreALivelock) {
  Device device;
  const Report report = device.launch({.block = {2, 1, 1}}, {.max_switches = 1000}, [&] {
    for (;;) ptx::sync_threads();
  });
  EXPECT_TRUE(report.has(Fault::livelock)) << report.text();
}

/// A grid that writes eight numbers, and one that depends on it and adds them up; who waits for the first one is told.
template <class Wait>
Report run_dependent(bool is_dependent, Wait wait) {
  Device device;
  auto* numbers = device.buffer<int>("numbers", 8);
  auto* sum = device.buffer<int>("sum", 1);
  Report first = device.launch({.grid = {8, 1, 1}, .block = {1, 1, 1}}, {}, [&] {
    ptx::st_global(numbers + ptx::block_idx().x, ptx::block_idx().x);
  });
  EXPECT_EQ(first.text(), "");
  const LaunchConfig config{.block = {64, 1, 1}, .is_dependent = is_dependent};
  Report second = device.launch(config, {}, [&] {
    wait();
    if (ptx::thread_idx().x != 0) return;
    int total = 0;
    for (int i = 0; i < 8; ++i) total += ptx::ld_global(numbers + i);
    ptx::st_global(numbers, 0);
    ptx::st_global(sum, total);
  });
  EXPECT_EQ(*sum, 28);
  return second;
}

TEST(DependentLaunch, WaitsForTheGridBefore) {
  EXPECT_EQ(run_dependent(true, [] { ptx::griddepcontrol_wait(); }).text(), "");
}

TEST(DependentLaunch, WithoutAWaitRacesWithTheGridBefore) {
  const Report report = run_dependent(true, [] {});
  EXPECT_TRUE(report.has(Fault::race));
  EXPECT_THAT(report.text(), HasSubstr("the grid before"));
}

TEST(DependentLaunch, AnotherThreadMayWaitWhereABarrierFollows) {
  const auto last_waits = [] {
    if (ptx::thread_idx().x == 63) ptx::griddepcontrol_wait();
  };
  EXPECT_TRUE(run_dependent(true, last_waits).has(Fault::race));
  EXPECT_EQ(run_dependent(true,
                          [&] {
                            last_waits();
                            ptx::sync_threads();
                          })
                .text(),
            "");
}

TEST(DependentLaunch, OthersStartWhenTheGridBeforeHasEnded) {
  EXPECT_EQ(run_dependent(false, [] {}).text(), "");
}

}  // namespace
}  // namespace fovea::cuda::emulator
