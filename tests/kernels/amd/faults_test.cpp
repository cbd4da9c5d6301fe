// Planted mistakes in a kernel for CDNA: the emulator names each, and says nothing of the right kernel.
#include <gtest/gtest.h>

#include <utility>

#include "cuda/emulator/emulator.hpp"
#include "emulator/guests/attention_cdna.cuh"
#include "emulator/guests/attention_problem.hpp"

namespace fovea::cuda::emulator {
namespace {

using guest_cdna::Planted;

// Tiles enough that both stages are used again.
constexpr int kKeys = 4 * guest_cdna::kTileKv;

struct Outcome {
  Report report;
  double error;
};

template <Planted planted>
Outcome run(const Options& options) {
  static const AttentionProblem problem(guest_cdna::kTileQ, kKeys, guest_cdna::kHeadDim);
  Device device;
  float* out = device.buffer<float>("out", problem.q.size());
  const guest_cdna::Params params{.q = device.buffer("q", problem.q),
                                  .k = device.buffer("k", problem.k),
                                  .v = device.buffer("v", problem.v),
                                  .out = out,
                                  .seqlen_kv = problem.keys,
                                  .softmax_scale_log2 = problem.scale_log2()};
  const LaunchConfig config{.block = {guest_cdna::kThreads, 1, 1},
                            .shared_bytes = guest_cdna::kSharedBytes,
                            .warp_lanes = 64,
                            .gfx = 0x942};
  Report report = device.launch(config, options, [&] { guest_cdna::attention<planted>(params); });
  return {std::move(report), problem.error(out)};
}

template <Planted planted>
void expect_fault(Fault fault) {
  const Report report =
      sweep(3, [](const Options& options) { return run<planted>(options).report; });
  EXPECT_TRUE(report.has(fault)) << name(fault) << " expected\n" << report.text();
}

// What the hardware would compute as well: only the numbers tell.
template <Planted planted>
void expect_wrong_numbers() {
  const Outcome outcome = run<planted>({});
  EXPECT_EQ(outcome.report.text(), "");
  EXPECT_FALSE(outcome.error < kAllowedError);
}

TEST(CdnaFaults, RightKernelIsCleanOverSeeds) {
  const Report report = sweep(10, [](const Options& options) {
    Outcome outcome = run<Planted::nothing>(options);
    EXPECT_LT(outcome.error, kAllowedError) << "seed " << options.seed;
    return std::move(outcome.report);
  });
  EXPECT_EQ(report.text(), "");
}

TEST(CdnaFaults, MissingWaitIsARace) { expect_fault<Planted::wait_missing>(Fault::race); }

TEST(CdnaFaults, WaitOneCopyShortIsARace) {
  expect_fault<Planted::wait_one_copy_short>(Fault::race);
}

TEST(CdnaFaults, MissingBarrierBeforeAStageIsUsedAgainIsARace) {
  expect_fault<Planted::barrier_before_reuse_missing>(Fault::race);
}

TEST(CdnaFaults, BarrierWithoutAFenceBeforeItIsARace) {
  expect_fault<Planted::fence_before_barrier_missing>(Fault::race);
}

TEST(CdnaFaults, BarrierWithoutAFenceBehindItIsARace) {
  expect_fault<Planted::fence_after_barrier_missing>(Fault::race);
}

TEST(CdnaFaults, DestinationsThatDifferByLaneAreNamed) {
  expect_fault<Planted::destination_by_lane>(Fault::divergence);
}

TEST(CdnaFaults, SwizzleThatDiffersGivesWrongNumbers) {
  expect_wrong_numbers<Planted::swizzle_differs>();
}

TEST(CdnaFaults, DepthsOfSwappedHalvesGiveWrongNumbers) {
  expect_wrong_numbers<Planted::lane_halves_swapped>();
}

TEST(CdnaFaults, KeysOfSwappedHalvesGiveWrongNumbers) {
  expect_wrong_numbers<Planted::keys_of_halves_swapped>();
}

TEST(CdnaFaults, MaximumOfTheWrongLanesGivesWrongNumbers) {
  expect_wrong_numbers<Planted::row_exchanged_within_half>();
}

}  // namespace
}  // namespace fovea::cuda::emulator
