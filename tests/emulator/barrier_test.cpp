// mbarriers apart from copies, and what their misuse is called.

#include "ptx/barrier.cuh"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "ptx/cp_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::emulator {
namespace {

constexpr std::uint32_t kData = 64;
constexpr LaunchConfig kTwoWarps{.block = {64, 1, 1}, .shared_bytes = 4096};

ptx::SharedAddress barrier(int idx) { return ptx::dynamic_shared() + 8 * idx; }

void init(int idx, std::uint32_t count) {
  if (ptx::thread_idx().x == 0) ptx::mbarrier_init(barrier(idx), count);
  ptx::sync_threads();
}

Report sweep_launch(const std::function<void()>& kernel) {
  return sweep(20, [&](const Options& options) {
    Device device;
    return device.launch(kTwoWarps, options, kernel);
  });
}

TEST(Mbarrier, WaiterSeesWhatWasWrittenBeforeTheArrivals) {
  const Report report = sweep_launch([] {
    init(0, 32);
    const int thread = ptx::thread_idx().x;
    const ptx::SharedAddress data = ptx::dynamic_shared() + kData;
    for (int round = 0; round < 4; ++round) {
      if (thread < 32) {
        ptx::st_shared(data + 4 * thread, round);
        ptx::mbarrier_arrive(barrier(0));
      } else {
        while (!ptx::mbarrier_try_wait_parity(barrier(0), round % 2)) continue;
        ptx::ld_shared<int>(data + 4 * (63 - thread));
      }
      ptx::sync_threads();
    }
  });
  EXPECT_EQ(report.text(), "");
}

TEST(Mbarrier, PhaseThatAWaiterMayMissIsNamed) {
  const Report report = sweep_launch([] {
    init(0, 32);
    if (ptx::thread_idx().x < 32) {
      for (int phase = 0; phase < 2; ++phase) ptx::mbarrier_arrive(barrier(0));
    } else {
      for (int phase = 0; phase < 2; ++phase) ptx::mbarrier_wait_parity(barrier(0), phase);
    }
  });
  EXPECT_FALSE(report.is_clean());
  EXPECT_TRUE(report.has(Fault::parity_aliasing) || report.has(Fault::deadlock)) << report.text();
}

TEST(Mbarrier, ArrivalTooManyIsNamed) {
  const Report report = sweep_launch([] {
    init(0, 32);
    if (ptx::thread_idx().x == 0) ptx::mbarrier_arrive_count(barrier(0), 33);
  });
  EXPECT_TRUE(report.has(Fault::mbarrier_misuse)) << report.text();
}

TEST(Mbarrier, UseBeforeInitIsNamed) {
  const Report report = sweep_launch([] { ptx::mbarrier_arrive(barrier(1)); });
  EXPECT_TRUE(report.has(Fault::mbarrier_misuse)) << report.text();
}

TEST(Mbarrier, SecondInitNeedsInval) {
  const Report twice = sweep_launch([] {
    init(0, 1);
    init(0, 2);
  });
  EXPECT_TRUE(twice.has(Fault::mbarrier_misuse)) << twice.text();
  const Report ended = sweep_launch([] {
    init(0, 1);
    if (ptx::thread_idx().x == 0) ptx::mbarrier_inval(barrier(0));
    init(0, 2);
  });
  EXPECT_EQ(ended.text(), "");
}

TEST(Mbarrier, BytesWrittenOverItAreNamed) {
  const Report report = sweep_launch([] {
    init(0, 64);
    if (ptx::thread_idx().x == 0) ptx::st_shared(barrier(0) + 4, 0);
    ptx::sync_threads();
    ptx::mbarrier_arrive(barrier(0));
  });
  EXPECT_TRUE(report.has(Fault::mbarrier_misuse)) << report.text();
}

TEST(Mbarrier, CopiesOfAThreadArriveWhenTheyHaveLanded) {
  const std::vector<std::uint32_t> values(32 * 4, 7);
  const Report report = sweep(20, [&](const Options& options) {
    Device device;
    const std::uint32_t* in = device.buffer("in", values);
    return device.launch(kTwoWarps, options, [&] {
      init(0, 32);
      const int thread = ptx::thread_idx().x;
      const ptx::SharedAddress data = ptx::dynamic_shared() + kData;
      if (thread < 32) {
        ptx::cp_async_16(data + 16 * thread, in + 4 * thread, 16);
        ptx::cp_async_mbarrier_arrive_noinc(barrier(0));
      } else {
        ptx::mbarrier_wait_parity(barrier(0), 0);
        ptx::ld_shared<ptx::U32x4>(data + 16 * (63 - thread));
      }
    });
  });
  EXPECT_EQ(report.text(), "");
}

// A bulk load reads what ordinary stores of the same kernel wrote to global memory.
Report run_global_round_trip(bool has_fence) {
  return sweep(5, [&](const Options& options) {
    Device device;
    auto* scratch = device.buffer<std::uint32_t>("scratch", 64);
    return device.launch(kTwoWarps, options, [&] {
      if (ptx::thread_idx().x == 0) {
        ptx::mbarrier_init(barrier(0), 1);
        ptx::fence_mbarrier_init_release_cluster();
      }
      ptx::st_global(scratch + ptx::thread_idx().x, 5U);
      if (has_fence) ptx::fence_proxy_async_global();
      ptx::sync_threads();
      if (ptx::thread_idx().x == 0) {
        ptx::mbarrier_arrive_expect_tx(barrier(0), 256);
        ptx::cp_async_bulk_load(ptx::dynamic_shared() + kData, scratch, 256, barrier(0),
                                ptx::CachePolicy::evict_first);
      }
      ptx::mbarrier_wait_parity(barrier(0), 0);
    });
  });
}

TEST(Mbarrier, GlobalMemoryNeedsAProxyFenceToo) {
  EXPECT_EQ(run_global_round_trip(true).text(), "");
  EXPECT_TRUE(run_global_round_trip(false).has(Fault::proxy_fence_missing));
}

}  // namespace
}  // namespace fovea::cuda::emulator
