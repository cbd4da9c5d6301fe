// What lanes of a warp and threads of a CTA do together.

#include "ptx/warp.cuh"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/instructions.hpp"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace fovea::cuda::emulator {
namespace {

constexpr LaunchConfig kOneWarp{.block = {32, 1, 1}, .shared_bytes = 4096};

TEST(Warp, ShuffleGivesTheOtherLanesValue) {
  Device device;
  auto* out = device.buffer<int>("out", 64);
  const Report report = device.launch(kOneWarp, {}, [&] {
    const int lane = ptx::lane_idx();
    ptx::st_global(out + lane, ptx::shfl_bfly(lane * 10, 5));
    ptx::st_global(out + 32 + lane, ptx::shfl_idx(lane * 10, 31 - lane));
  });
  EXPECT_EQ(report.text(), "");
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(out[lane], (lane ^ 5) * 10);
    EXPECT_EQ(out[32 + lane], (31 - lane) * 10);
  }
}

/// A block of one warp and a half: lanes, votes and shuffles reach across the 32nd, and a barrier counts whole warps.
TEST(Warp, HasAsManyLanesAsTheLaunchSays) {
  Device device;
  auto* out = device.buffer<std::uint64_t>("out", 4 * 96);
  const LaunchConfig config{.block = {96, 1, 1}, .shared_bytes = 384, .warp_lanes = 64};
  const Report report = device.launch(config, {}, [&] {
    const auto thread = static_cast<std::uint32_t>(ptx::thread_idx().x);
    const Instruction what{"test", Site::here()};
    std::uint64_t* const mine = out + 4 * thread;
    ptx::st_global(mine, std::uint64_t{warp_idx()} * 100 + lane_idx());
    ptx::st_global(mine + 1, ballot(lane_idx() % 3 == 0, what));
    ptx::st_global(mine + 2,
                   std::uint64_t{shuffle(thread, lane_idx() ^ (thread < 64 ? 32U : 16U), what)});
    ptx::st_shared(ptx::dynamic_shared() + 4 * thread, thread);
    ptx::sync_threads();
    ptx::st_global(mine + 3, std::uint64_t{ptx::ld_shared<std::uint32_t>(ptx::dynamic_shared() +
                                                                         4 * (95 - thread))});
  });
  EXPECT_EQ(report.text(), "");
  for (std::uint32_t thread = 0; thread < 96; ++thread) {
    const std::uint64_t lanes = thread < 64 ? ~std::uint64_t{0} : 0xffffffffU;
    EXPECT_EQ(out[4 * thread], thread / 64 * 100 + thread % 64);
    EXPECT_EQ(out[4 * thread + 1], 0x9249249249249249U & lanes);
    EXPECT_EQ(out[4 * thread + 2], thread ^ (thread < 64 ? 32U : 16U));
    EXPECT_EQ(out[4 * thread + 3], 95 - thread);
  }
}

/// Which one hardware elects no manual says; it is the same one each time.
TEST(Warp, ElectsAnyLane) {
  std::set<int> elected;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Device device;
    auto* lanes = device.buffer("lanes", std::vector<int>(2, -1));
    const Report report = device.launch(kOneWarp, {.seed = seed}, [&] {
      for (int i = 0; i < 2; ++i)
        if (ptx::elect_one()) ptx::st_global(lanes + i, ptx::lane_idx());
    });
    EXPECT_EQ(report.text(), "");
    EXPECT_EQ(lanes[0], lanes[1]);
    elected.insert(lanes[0]);
  }
  EXPECT_GT(elected.size(), 10U);
}

/// The emulator puts such bits into accumulators of wgmma; an address may end in them.
TEST(Warp, ValueThatLooksLikeAnAccumulatorInFlightIsNoFault) {
  Device device;
  auto* out = device.buffer<std::uint32_t>("out", 32);
  const Report report = device.launch(
      kOneWarp, {}, [&] { ptx::st_global(out + ptx::lane_idx(), ptx::shfl_bfly(kInFlight, 1)); });
  EXPECT_EQ(report.text(), "");
  EXPECT_EQ(out[7], kInFlight);
}

TEST(Warp, BallotHasABitForEachLane) {
  Device device;
  auto* out = device.buffer<std::uint32_t>("out", 32);
  const Report report = device.launch(kOneWarp, {}, [&] {
    const int lane = ptx::lane_idx();
    ptx::st_global(out + lane, ptx::ballot(lane % 3 == 0));
  });
  EXPECT_EQ(report.text(), "");
  EXPECT_EQ(out[7], 0x49249249U);
}

TEST(Warp, BlocksOfTheGridAreAllRun) {
  Device device;
  auto* out = device.buffer<int>("out", 2 * 3 * 32);
  const LaunchConfig config{.grid = {2, 3, 1}, .block = {32, 1, 1}};
  const Report report = device.launch(config, {}, [&] {
    const ptx::Index3 cta = ptx::block_idx(), grid = ptx::grid_dim();
    ptx::st_global(out + (cta.y * grid.x + cta.x) * 32 + ptx::thread_idx().x, cta.x + 10 * cta.y);
  });
  EXPECT_EQ(report.text(), "");
  EXPECT_EQ(out[5 * 32 + 31], 21);
}

TEST(Warp, LdmatrixSpreadsRowsOverLanes) {
  Device device;
  auto* out = device.buffer<std::uint32_t>("out", 64);
  const Report report = device.launch(kOneWarp, {}, [&] {
    const int lane = ptx::lane_idx();
    const ptx::SharedAddress row = ptx::dynamic_shared() + 16 * lane;
    for (int i = 0; i < 8; ++i) {
      ptx::st_shared(row + 2 * i, static_cast<std::uint16_t>(100 * lane + i));
    }
    ptx::sync_warp();
    ptx::st_global(out + lane, ptx::ldmatrix_x4(row).y);
    ptx::st_global(out + 32 + lane, ptx::ldmatrix_x4_trans(row).y);
  });
  EXPECT_EQ(report.text(), "");
  const int row = 13 / 4, column = 2 * (13 % 4);
  const auto element = [](int r, int c) { return static_cast<std::uint32_t>(100 * (8 + r) + c); };
  EXPECT_EQ(out[13], element(row, column) | element(row, column + 1) << 16);
  EXPECT_EQ(out[32 + 13], element(column, row) | element(column + 1, row) << 16);
}

TEST(Warp, ProductsOfE4m3NeedAGpuThatHasThem) {
  constexpr std::uint32_t kOnes = 0x38383838U;
  const auto run = [](int compute_capability) {
    Device device;
    auto* out = device.buffer<float>("out", 32);
    LaunchConfig config = kOneWarp;
    config.compute_capability = compute_capability;
    const Report report = device.launch(config, {}, [&] {
      float d[4] = {};
      ptx::mma_m16n8k32_e4m3(d, {kOnes, kOnes, kOnes, kOnes}, kOnes, kOnes);
      ptx::st_global(out + ptx::lane_idx(), d[0]);
    });
    EXPECT_EQ(out[5], 32.0F);
    return report;
  };
  EXPECT_TRUE(run(0).is_clean());
  EXPECT_TRUE(run(89).is_clean());
  const Report on_ampere = run(86);
  ASSERT_TRUE(on_ampere.has(Fault::architecture)) << on_ampere.text();
  EXPECT_THAT(on_ampere.text(),
              testing::HasSubstr("mma.sync.e4m3 needs compute capability 8.9; the GPU has 8.6"));
}

TEST(Warp, LanesAtDifferentInstructionsAreReported) {
  Device device;
  const Report report = device.launch(kOneWarp, {}, [&] {
    if (ptx::lane_idx() < 16) {
      ptx::sync_warp();
    } else {
      ptx::ballot(true);
    }
  });
  ASSERT_TRUE(report.has(Fault::divergence)) << report.text();
  EXPECT_THAT(report.text(), testing::HasSubstr("bar.warp.sync"));
}

}  // namespace
}  // namespace fovea::cuda::emulator
