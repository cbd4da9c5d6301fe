// Planted mistakes in a warp-specialised kernel for sm_90a: the emulator names each, and says nothing of the right
// kernel.

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "emulator/guests/attention_problem.hpp"
#include "emulator/guests/attention_sm90.cuh"

namespace fovea::cuda::emulator {
namespace {

using guest90::Planted;

// 3 tiles of 32 keys, the last with 6; 2 tiles of queries: each barrier goes through several phases.
constexpr int kKeys = 70, kTiles = 2;
constexpr std::size_t kPanel = 64;

/// Out is rounded to bf16 as well: 2^-9 of values up to 4.
constexpr double kAllowed = kAllowedError + 0.008;

struct Outcome {
  Report report;
  double error;
};

ptx::TensorMap map_of(const void* data, int rows, int box_rows,
                      driver::TensorMapSwizzle swizzle = driver::TensorMapSwizzle::bytes_128) {
  driver::TensorMapSpec spec;
  spec.rank = 3;
  spec.shape = {kPanel, static_cast<std::uint64_t>(rows), guest90::kHeadDim / kPanel};
  spec.stride_bytes = {2, guest90::kHeadDim * 2, kPanel * 2};
  spec.box = {kPanel, static_cast<std::uint32_t>(box_rows), guest90::kHeadDim / kPanel};
  spec.swizzle = swizzle;
  return encode_tensor_map<ptx::TensorMap>(spec, data);
}

struct Guest {
  AttentionProblem problem{kTiles * guest90::kTileQ, kKeys, guest90::kHeadDim};
  driver::TensorMapSwizzle v_swizzle = driver::TensorMapSwizzle::bytes_128;

  template <Planted planted>
  Outcome run(const Options& options) const {
    Device device;
    const std::size_t count = problem.q.size();
    auto* out = device.buffer<std::uint16_t>("out", count);
    const guest90::Params params{
        .q = map_of(device.buffer("q", problem.q), problem.rows, 64),
        .k = map_of(device.buffer("k", problem.k), kKeys, guest90::kTileKv),
        .v = map_of(device.buffer("v", problem.v), kKeys, guest90::kTileKv, v_swizzle),
        .out = map_of(out, problem.rows, 64),
        .seqlen_kv = kKeys,
        .num_tiles = kTiles,
        .softmax_scale_log2 = problem.scale_log2()};
    const LaunchConfig config{.block = {guest90::kThreads, 1, 1},
                              .shared_bytes = guest90::kSharedBytes};
    Report report = device.launch(config, options, [&] { guest90::attention<planted>(params); });
    std::vector<float> got;
    for (std::size_t i = 0; i < count; ++i) got.push_back(decode_bf16(out[i]));
    const double error = problem.error(got.data());
    return {std::move(report), error};
  }

  template <Planted planted>
  Report find() const {
    return sweep(3, [&](const Options& options) { return run<planted>(options).report; });
  }
};

template <Planted planted>
void expect_fault(Fault fault) {
  const Report report = Guest().find<planted>();
  EXPECT_TRUE(report.has(fault)) << name(fault) << " expected\n" << report.text();
}

template <Planted planted>
void expect_wrong_numbers(const Guest& guest = Guest()) {
  const Outcome outcome = guest.run<planted>({});
  EXPECT_GT(outcome.error, kAllowed) << outcome.report.text();
}

TEST(Sm90Faults, RightKernelIsCleanOverSeeds) {
  const Guest guest;
  const Report report = sweep(200, [&](const Options& options) {
    Outcome outcome = guest.run<Planted::nothing>(options);
    EXPECT_LT(outcome.error, kAllowed) << "seed " << options.seed;
    return std::move(outcome.report);
  });
  EXPECT_EQ(report.text(), "");
}

TEST(Sm90Faults, MissingWaitForAnEmptyStageIsARace) {
  expect_fault<Planted::empty_wait_missing>(Fault::race);
}

TEST(Sm90Faults, MissingArriveIsADeadlock) {
  expect_fault<Planted::empty_arrive_missing>(Fault::deadlock);
}

TEST(Sm90Faults, ArrivalCountTooLowLetsAStageGoEarly) {
  expect_fault<Planted::empty_count_too_low>(Fault::race);
}

TEST(Sm90Faults, ArrivalCountTooHighIsADeadlock) {
  expect_fault<Planted::empty_count_too_high>(Fault::deadlock);
}

TEST(Sm90Faults, OneArrivalForAWarpgroupIsARace) {
  expect_fault<Planted::one_arrival_for_a_warpgroup>(Fault::race);
}

TEST(Sm90Faults, ReleaseBeforeTheWaitIsARace) {
  expect_fault<Planted::release_before_wgmma_wait>(Fault::race);
}

TEST(Sm90Faults, TooFewExpectedBytesAreNamed) {
  expect_fault<Planted::expected_bytes_too_few>(Fault::transaction_bytes);
}

TEST(Sm90Faults, TooManyExpectedBytesAreNamed) {
  expect_fault<Planted::expected_bytes_too_many>(Fault::transaction_bytes);
}

TEST(Sm90Faults, MissingExpectIsNamed) {
  expect_fault<Planted::expect_missing>(Fault::transaction_bytes);
}

TEST(Sm90Faults, WrongStartParityOfTheProducerIsADeadlock) {
  expect_fault<Planted::producer_parity_wrong>(Fault::deadlock);
}

TEST(Sm90Faults, WrongStartParityOfTheConsumerIsADeadlock) {
  expect_fault<Planted::consumer_parity_wrong>(Fault::deadlock);
}

TEST(Sm90Faults, ParityThatNeverFlipsIsADeadlock) {
  expect_fault<Planted::parity_never_flips>(Fault::deadlock);
}

TEST(Sm90Faults, MissingFenceOfMbarrierInitIsNamed) {
  expect_fault<Planted::mbarrier_fence_missing>(Fault::mbarrier_misuse);
}

TEST(Sm90Faults, MissingBarrierAfterInitIsNamed) {
  expect_fault<Planted::barrier_after_init_missing>(Fault::mbarrier_misuse);
}

TEST(Sm90Faults, MissingProxyFenceIsNamed) {
  expect_fault<Planted::proxy_fence_missing>(Fault::proxy_fence_missing);
}

TEST(Sm90Faults, ProxyFenceByTheReaderAloneIsNamed) {
  expect_fault<Planted::proxy_fence_by_the_reader>(Fault::proxy_fence_missing);
}

TEST(Sm90Faults, MissingWgmmaFenceIsNamed) {
  expect_fault<Planted::wgmma_fence_missing>(Fault::wgmma_fence_missing);
}

TEST(Sm90Faults, WgmmaFenceBeforePIsWrittenIsNamed) {
  expect_fault<Planted::wgmma_fence_before_p>(Fault::wgmma_fence_missing);
}

TEST(Sm90Faults, MissingCommitIsNamed) {
  expect_fault<Planted::wgmma_commit_missing>(Fault::accumulator_in_flight);
}

TEST(Sm90Faults, AccumulatorReadBeforeTheWaitIsNamed) {
  expect_fault<Planted::accumulator_read_before_wait>(Fault::accumulator_in_flight);
}

TEST(Sm90Faults, PWrittenWhileWgmmaReadsItIsNamed) {
  expect_fault<Planted::p_overwritten_in_flight>(Fault::operand_overwritten);
}

TEST(Sm90Faults, OutScaledInFlightIsNamed) {
  expect_fault<Planted::out_scaled_in_flight>(Fault::accumulator_in_flight);
}

TEST(Sm90Faults, MissingLastWaitIsNamed) {
  expect_fault<Planted::last_wait_missing>(Fault::accumulator_in_flight);
}

TEST(Sm90Faults, WarpThatSkipsAProductIsNamed) {
  expect_fault<Planted::warp_skips_a_product>(Fault::divergence);
}

TEST(Sm90Faults, StageOverBarriersIsNamed) {
  expect_fault<Planted::stage_overlaps_barriers>(Fault::mbarrier_misuse);
}

TEST(Sm90Faults, StoreWhoseReadsNobodyAwaitsIsARace) {
  expect_fault<Planted::store_read_not_waited>(Fault::race);
}

TEST(Sm90Faults, StoreThatIsReadingAtExitIsNamed) {
  expect_fault<Planted::store_not_waited_at_exit>(Fault::copy_not_waited);
}

TEST(Sm90Faults, RegistersBeyondThePoolAreADeadlock) {
  expect_fault<Planted::registers_beyond_the_pool>(Fault::deadlock);
}

TEST(Sm90Faults, RegistersOfOneWarpAloneAreNamed) {
  expect_fault<Planted::registers_of_one_warp>(Fault::register_budget);
}

TEST(Sm90Faults, WrongCountOfANamedBarrierIsNamed) {
  expect_fault<Planted::turn_count_wrong>(Fault::barrier_count);
}

// What the hardware would compute as well: only the numbers tell.
TEST(Sm90Faults, WrongStrideOffsetGivesWrongNumbers) {
  expect_wrong_numbers<Planted::stride_offset_wrong>();
}

TEST(Sm90Faults, WrongLeadingOffsetGivesWrongNumbers) {
  expect_wrong_numbers<Planted::leading_offset_wrong>();
}

TEST(Sm90Faults, WrongSwizzleOfADescriptorGivesWrongNumbers) {
  expect_wrong_numbers<Planted::swizzle_of_descriptor_wrong>();
}

TEST(Sm90Faults, WrongDepthStepGivesWrongNumbers) {
  expect_wrong_numbers<Planted::depth_step_wrong>();
}

TEST(Sm90Faults, UnmaskedTailGivesWrongNumbers) { expect_wrong_numbers<Planted::tail_unmasked>(); }

TEST(Sm90Faults, SwappedCoordinatesGiveWrongNumbers) {
  expect_wrong_numbers<Planted::coordinates_swapped>();
}

TEST(Sm90Faults, WrongSwizzleOfATensorMapGivesWrongNumbers) {
  Guest guest;
  guest.v_swizzle = driver::TensorMapSwizzle::none;
  expect_wrong_numbers<Planted::nothing>(guest);
}

}  // namespace
}  // namespace fovea::cuda::emulator
