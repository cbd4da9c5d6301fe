// Planted mistakes in a kernel for the tensor core of sm_100: the emulator names each, and says nothing of the right
// kernel.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "cuda/emulator/tensor_map.hpp"
#include "emulator/guests/attention_problem.hpp"
#include "emulator/guests/attention_sm100.cuh"

namespace fovea::cuda::emulator {
namespace {

using guest100::Planted;

// 3 tiles of 32 keys, the last with 6; 2 tiles of queries: each barrier goes through several phases.
constexpr int kKeys = 70, kTiles = 2;

struct Outcome {
  Report report;
  double error;
};

ptx::TensorMap map_of(const void* data) {
  driver::TensorMapSpec spec;
  spec.rank = 2;
  spec.shape = {guest100::kHeadDim, kKeys};
  spec.stride_bytes = {2, guest100::kHeadDim * 2};
  spec.box = {guest100::kHeadDim, guest100::kTileKv};
  spec.swizzle = driver::TensorMapSwizzle::bytes_128;
  return encode_tensor_map<ptx::TensorMap>(spec, data);
}

struct Guest {
  AttentionProblem problem{kTiles * guest100::kTileQ, kKeys, guest100::kHeadDim};

  template <Planted planted>
  Outcome run(const Options& options) const {
    Device device;
    const std::size_t count = problem.q.size();
    auto* out = device.buffer<float>("out", count);
    const guest100::Params params{.q = device.buffer("q", problem.q),
                                  .out = out,
                                  .k = map_of(device.buffer("k", problem.k)),
                                  .v = map_of(device.buffer("v", problem.v)),
                                  .seqlen_kv = kKeys,
                                  .num_tiles = kTiles,
                                  .softmax_scale_log2 = problem.scale_log2()};
    const LaunchConfig config{.block = {guest100::kThreads, 1, 1},
                              .shared_bytes = guest100::kSharedBytes};
    Report report = device.launch(config, options, [&] { guest100::attention<planted>(params); });
    const double error = problem.error(out);
    return {std::move(report), error};
  }

  template <Planted planted>
  Report find(TensorOrder order = TensorOrder::text) const {
    return sweep(3, [&](Options options) {
      options.tensor_order = order;
      return run<planted>(options).report;
    });
  }
};

template <Planted planted>
void expect_fault(Fault fault) {
  const Report report = Guest().find<planted>();
  EXPECT_TRUE(report.has(fault)) << name(fault) << " expected\n" << report.text();
}

template <Planted planted>
void expect_wrong_numbers() {
  const Outcome outcome = Guest().run<planted>({});
  EXPECT_GT(outcome.error, kAllowedError) << outcome.report.text();
}

/// Right by what kernels in use rely on, a mistake by the text of the ISA.
template <Planted planted>
void expect_only_in_text(Fault fault) {
  expect_fault<planted>(fault);
  EXPECT_EQ(Guest().find<planted>(TensorOrder::pipe).text(), "");
}

TEST(Sm100Faults, RightKernelIsCleanOverSeeds) {
  const Guest guest;
  for (const TensorOrder order : {TensorOrder::text, TensorOrder::pipe}) {
    const Report report = sweep(order == TensorOrder::text ? 200 : 20, [&](Options options) {
      options.tensor_order = order;
      Outcome outcome = guest.run<Planted::nothing>(options);
      EXPECT_LT(outcome.error, kAllowedError) << "seed " << options.seed;
      return std::move(outcome.report);
    });
    EXPECT_EQ(report.text(), "");
  }
}

TEST(Sm100Faults, AddressReadBeforeTheBarrierIsARace) {
  expect_fault<Planted::address_read_before_barrier>(Fault::race);
}

TEST(Sm100Faults, AddressTakenForZeroIsNamed) {
  expect_fault<Planted::address_taken_for_zero>(Fault::tensor_address);
}

TEST(Sm100Faults, ColumnsNotGivenBackAreNamed) {
  expect_fault<Planted::dealloc_missing>(Fault::tensor_allocation);
}

TEST(Sm100Faults, ColumnsGivenBackTwiceAreNamed) {
  expect_fault<Planted::dealloc_twice>(Fault::tensor_allocation);
}

TEST(Sm100Faults, ColumnsGivenBackByHalfAreNamed) {
  expect_fault<Planted::dealloc_of_half>(Fault::tensor_allocation);
}

TEST(Sm100Faults, ColumnsGivenBackUnderALoadAreARace) {
  expect_fault<Planted::dealloc_before_the_last_load>(Fault::race);
}

TEST(Sm100Faults, AllocationAfterThePermitIsGoneIsNamed) {
  expect_fault<Planted::alloc_after_relinquish>(Fault::tensor_allocation);
}

TEST(Sm100Faults, AllocationLargerThanAnEarlierOneIsNamed) {
  expect_fault<Planted::alloc_grows>(Fault::tensor_allocation);
}

TEST(Sm100Faults, LoadUsedBeforeItsWaitIsNamed) {
  expect_fault<Planted::load_used_before_wait>(Fault::tensor_load_in_flight);
}

TEST(Sm100Faults, LoadThatTheWaitDoesNotNameIsNamed) {
  expect_fault<Planted::load_not_named>(Fault::tensor_load_in_flight);
}

TEST(Sm100Faults, LoadWithoutWaitAtExitIsNamed) {
  expect_fault<Planted::load_not_waited_at_exit>(Fault::tensor_not_awaited);
}

TEST(Sm100Faults, StoreOfPWithoutWaitIsARace) {
  expect_fault<Planted::store_not_waited>(Fault::race);
}

TEST(Sm100Faults, LoadOfAnotherWarpsLanesIsNamed) {
  expect_fault<Planted::load_of_another_quarter>(Fault::tensor_address);
}

TEST(Sm100Faults, StoreToAnotherWarpsLanesIsNamed) {
  expect_fault<Planted::store_to_another_quarter>(Fault::tensor_address);
}

TEST(Sm100Faults, AddressesThatDifferInAWarpAreNamed) {
  expect_fault<Planted::addresses_differ_in_a_warp>(Fault::tensor_address);
}

TEST(Sm100Faults, ProductIssuedByAllLanesIsNamed) {
  expect_fault<Planted::issued_by_all_lanes>(Fault::tensor_issue);
}

TEST(Sm100Faults, CommitByAnotherLaneIsNamed) {
  expect_fault<Planted::committed_by_another_lane>(Fault::tensor_issue);
}

TEST(Sm100Faults, ScoresReadBeforeTheirCommitAreARace) {
  expect_fault<Planted::scores_not_awaited>(Fault::race);
}

TEST(Sm100Faults, StageReleasedByAnArriveIsARace) {
  expect_fault<Planted::stage_released_by_arrive>(Fault::race);
}

TEST(Sm100Faults, ProductWithoutCommitIsADeadlock) {
  expect_fault<Planted::commit_missing>(Fault::deadlock);
}

TEST(Sm100Faults, ColumnsBeyondTheAllocationAreNamed) {
  expect_fault<Planted::columns_beyond_the_allocation>(Fault::tensor_address);
}

TEST(Sm100Faults, TwoCtaGroupsAreNamed) {
  expect_fault<Planted::cta_group_mixed>(Fault::tensor_issue);
}

TEST(Sm100Faults, ArrivalOfPBeforeItsScoresAreReadIsARace) {
  expect_fault<Planted::p_arrives_before_its_load>(Fault::race);
}

TEST(Sm100Faults, ArrivalOfPByOneWarpIsARace) { expect_fault<Planted::p_of_one_warp>(Fault::race); }

TEST(Sm100Faults, CountOfPTooLowIsARace) { expect_fault<Planted::p_count_too_low>(Fault::race); }

TEST(Sm100Faults, ArrivalOfPWithoutSyncWarpIsARace) {
  expect_fault<Planted::p_arrives_without_sync_warp>(Fault::race);
}

TEST(Sm100Faults, OutScaledUnderAProductIsARace) {
  expect_fault<Planted::out_scaled_in_flight>(Fault::race);
}

TEST(Sm100Faults, OutReadUnderAProductIsARace) {
  expect_fault<Planted::out_read_in_flight>(Fault::race);
}

TEST(Sm100Faults, NextTileBeforeOutIsReadIsARace) {
  expect_fault<Planted::next_tile_before_out_is_read>(Fault::race);
}

TEST(Sm100Faults, MissingProxyFenceIsNamed) {
  expect_fault<Planted::proxy_fence_missing>(Fault::proxy_fence_missing);
}

TEST(Sm100Faults, ParityThatNeverFlipsIsNamed) {
  expect_fault<Planted::parity_never_flips>(Fault::deadlock);
}

TEST(Sm100Faults, MissingArrivalIsADeadlock) {
  expect_fault<Planted::correct_skips_an_arrival>(Fault::deadlock);
}

TEST(Sm100Faults, DescriptorOfWgmmaIsNamed) {
  expect_fault<Planted::descriptor_of_wgmma>(Fault::descriptor);
}

TEST(Sm100Faults, BaseOffsetIsNamed) {
  expect_fault<Planted::base_offset_given>(Fault::descriptor);
}

TEST(Sm100Faults, ReservedBitIsNamed) {
  expect_fault<Planted::reserved_bit_set>(Fault::instruction_descriptor);
}

TEST(Sm100Faults, RowsOfNoShapeAreNamed) {
  expect_fault<Planted::rows_of_no_shape>(Fault::instruction_descriptor);
}

TEST(Sm100Faults, FirstProductThatAccumulatesIsAnUninitialisedRead) {
  expect_fault<Planted::first_product_accumulates>(Fault::uninitialised);
}

// What kernels in use do, and the text does not promise.
TEST(Sm100Faults, ScoresOverPInFlightAreARaceByTheText) {
  expect_only_in_text<Planted::scores_over_p_in_flight>(Fault::race);
}

TEST(Sm100Faults, MissingFenceBeforeAnArrivalIsNamedByTheText) {
  expect_only_in_text<Planted::fence_before_missing>(Fault::tensor_fence_missing);
}

TEST(Sm100Faults, MissingFenceAfterAWaitIsNamedByTheText) {
  expect_only_in_text<Planted::fence_after_missing>(Fault::tensor_fence_missing);
}

// What the hardware would compute as well: only the numbers tell.
TEST(Sm100Faults, ProductThatGoesOnFromAnotherTileGivesWrongNumbers) {
  expect_wrong_numbers<Planted::first_product_accumulates_later_tiles>();
}

TEST(Sm100Faults, ProductThatStartsAnewGivesWrongNumbers) {
  expect_wrong_numbers<Planted::later_product_starts_anew>();
}

TEST(Sm100Faults, WrongDepthStepGivesWrongNumbers) {
  expect_wrong_numbers<Planted::depth_step_wrong>();
}

TEST(Sm100Faults, SwappedOffsetsGivesWrongNumbers) {
  expect_wrong_numbers<Planted::offsets_swapped>();
}

TEST(Sm100Faults, MissingTranspositionGivesWrongNumbers) {
  expect_wrong_numbers<Planted::transposition_missing>();
}

TEST(Sm100Faults, ColumnsOfTheOtherProductGivesWrongNumbers) {
  expect_wrong_numbers<Planted::columns_of_the_other_product>();
}

TEST(Sm100Faults, POverScoresNotYetReadGivesWrongNumbers) {
  expect_wrong_numbers<Planted::p_over_unread_scores>();
}

}  // namespace
}  // namespace fovea::cuda::emulator
