// CTAs of a cluster: each other's shared memory, barriers and copies, and how long they must live.

#include "ptx/cluster.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::emulator {
namespace {

constexpr int kCtas = 2, kRows = 8, kColumns = 64;
constexpr std::uint32_t kTileBytes = kRows * kColumns * 2, kBarrier = kCtas * kTileBytes;
constexpr LaunchConfig kPair{.grid = {2 * kCtas, 1, 1},
                             .block = {32, 1, 1},
                             .cluster = {kCtas, 1, 1},
                             .shared_bytes = kBarrier + 16};

enum class Planted {
  nothing,
  start_barrier_missing,
  end_barrier_missing,
  half_expected,
  mask_wrong,
};

void meet_cluster() {
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

/// Each CTA loads one half for both, then adds what it has.
template <Planted planted>
void share_loads(const ptx::TensorMap& map, std::int32_t* out) {
  const ptx::SharedAddress smem = ptx::dynamic_shared(), barrier = smem + kBarrier;
  const int rank = ptx::cluster_cta_rank(), lane = ptx::lane_idx();
  if (lane == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  if (planted == Planted::start_barrier_missing) {
    ptx::sync_threads();
  } else {
    meet_cluster();
  }
  if (lane == 0) {
    const int tiles = planted == Planted::half_expected ? 1 : kCtas;
    ptx::mbarrier_arrive_expect_tx(barrier, tiles * kTileBytes);
    const std::int32_t coordinates[2] = {0, kRows * rank};
    const std::uint16_t mask = planted == Planted::mask_wrong ? 1 : 3;
    ptx::cp_async_bulk_tensor_load_multicast(smem + rank * kTileBytes, &map, coordinates, barrier,
                                             mask, ptx::CachePolicy::evict_last);
  }
  ptx::mbarrier_wait_parity(barrier, 0);
  std::int32_t sum = 0;
  for (int i = lane; i < kCtas * kRows * kColumns; i += 32) {
    sum += ptx::ld_shared<std::uint16_t>(smem + 2 * i);
  }
  for (int mask = 1; mask < 32; mask *= 2) sum += ptx::shfl_bfly(sum, mask);
  if (lane == 0) ptx::st_global(out + ptx::block_idx().x, sum);
}

/// Each CTA writes into the other one's shared memory, arrives there, and reads there what it wrote itself.
template <Planted planted>
void write_to_peer(std::int32_t* out) {
  const ptx::SharedAddress smem = ptx::dynamic_shared(), barrier = smem + kBarrier;
  const int peer = 1 - ptx::cluster_cta_rank(), lane = ptx::lane_idx();
  if (lane == 0) {
    ptx::mbarrier_init(barrier, 32);
    ptx::fence_mbarrier_init_release_cluster();
  }
  ptx::sync_warp();
  if (planted != Planted::start_barrier_missing) meet_cluster();
  ptx::st_shared_cluster(ptx::mapa(smem + 4 * lane, peer), 100 * peer + lane);
  ptx::mbarrier_arrive_release_remote(ptx::mapa(barrier, peer));
  ptx::mbarrier_wait_parity_acquire_cluster(barrier, 0);
  const auto mine = ptx::ld_shared<std::int32_t>(smem + 4 * lane);
  const auto theirs = ptx::ld_shared_cluster<std::int32_t>(ptx::mapa(smem + 4 * lane, peer));
  ptx::st_global(out + 32 * ptx::block_idx().x + lane, mine + 1000 * theirs);
  if (planted != Planted::end_barrier_missing) meet_cluster();
}

struct Outcome {
  Report report;
  std::vector<std::int32_t> out;
};

template <Planted planted>
Outcome run_shared_loads() {
  std::vector<std::uint16_t> values(kCtas * kRows * kColumns);
  std::iota(values.begin(), values.end(), std::uint16_t{0});
  Device device;
  driver::TensorMapSpec spec;
  spec.element = driver::TensorMapElement::u16;
  spec.rank = 2;
  spec.shape = {kColumns, kCtas * kRows};
  spec.stride_bytes = {2, kColumns * 2};
  spec.box = {kColumns, kRows};
  const auto map = encode_tensor_map<ptx::TensorMap>(spec, device.buffer("in", values));
  auto* out = device.buffer<std::int32_t>("out", 4);
  Report report = sweep(10, [&](const Options& options) {
    return device.launch(kPair, options, [&] { share_loads<planted>(map, out); });
  });
  return {std::move(report), {out, out + 4}};
}

template <Planted planted>
Outcome run_peer_writes() {
  Device device;
  auto* out = device.buffer<std::int32_t>("out", 4 * 32);
  Report report = sweep(10, [&](const Options& options) {
    return device.launch(kPair, options, [&] { write_to_peer<planted>(out); });
  });
  return {std::move(report), {out, out + 4 * 32}};
}

TEST(Cluster, MulticastReachesEveryCta) {
  const Outcome outcome = run_shared_loads<Planted::nothing>();
  EXPECT_EQ(outcome.report.text(), "");
  EXPECT_EQ(outcome.out, std::vector<std::int32_t>(4, 1023 * 1024 / 2));
}

TEST(Cluster, MulticastToACtaThatMayNotHaveStartedIsNamed) {
  const Outcome outcome = run_shared_loads<Planted::start_barrier_missing>();
  EXPECT_FALSE(outcome.report.is_clean());
  EXPECT_TRUE(outcome.report.has(Fault::cluster_lifetime) ||
              outcome.report.has(Fault::mbarrier_misuse))
      << outcome.report.text();
}

TEST(Cluster, MulticastBytesThatTheOtherCtaSendsCount) {
  const Outcome outcome = run_shared_loads<Planted::half_expected>();
  EXPECT_FALSE(outcome.report.is_clean());
  EXPECT_TRUE(outcome.report.has(Fault::race) || outcome.report.has(Fault::transaction_bytes))
      << outcome.report.text();
}

TEST(Cluster, MulticastToTooFewCtasIsADeadlock) {
  EXPECT_TRUE(run_shared_loads<Planted::mask_wrong>().report.has(Fault::deadlock));
}

TEST(Cluster, CtasWriteIntoEachOthersSharedMemory) {
  const Outcome outcome = run_peer_writes<Planted::nothing>();
  EXPECT_EQ(outcome.report.text(), "");
  EXPECT_EQ(outcome.out[32 + 7], 107 + 1000 * 7);
}

TEST(Cluster, CtaThatEndsUnderItsPeersAccessIsNamed) {
  const Outcome outcome = run_peer_writes<Planted::end_barrier_missing>();
  EXPECT_TRUE(outcome.report.has(Fault::cluster_lifetime)) << outcome.report.text();
}

TEST(Cluster, AccessBeforeThePeerHasStartedIsNamed) {
  const Outcome outcome = run_peer_writes<Planted::start_barrier_missing>();
  EXPECT_TRUE(outcome.report.has(Fault::cluster_lifetime)) << outcome.report.text();
}

}  // namespace
}  // namespace fovea::cuda::emulator
