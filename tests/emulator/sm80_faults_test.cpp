// Planted mistakes in a kernel for sm_80: the emulator names each, and says nothing of the right kernel.

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>

#include "cuda/emulator/emulator.hpp"
#include "emulator/guests/attention_problem.hpp"
#include "emulator/guests/attention_sm80.cuh"

namespace fovea::cuda::emulator {
namespace {

using guest80::Planted;

// 3 tiles of 32 keys, the last with 6: both stages are used again, and there is a tail.
constexpr int kKeys = 70, kCtas = 2;

struct Outcome {
  Report report;
  double error;
};

struct Guest {
  AttentionProblem problem;
  std::int64_t k_row_stride;

  explicit Guest(int keys = kKeys, std::int64_t stride = guest80::kHeadDim)
      : problem(kCtas * guest80::kTileQ, keys, guest80::kHeadDim), k_row_stride(stride) {}

  /// K with its rows as far apart as k_row_stride says.
  const std::uint16_t* spread_k(Device& device) const {
    if (k_row_stride == guest80::kHeadDim) return device.buffer("k", problem.k);
    const std::size_t row_bytes = guest80::kHeadDim * sizeof(std::uint16_t);
    auto* k = static_cast<std::uint16_t*>(
        device.sparse_buffer("k", static_cast<std::uint64_t>(k_row_stride * problem.keys) * 2));
    for (int key = 0; key < problem.keys; ++key) {
      std::memcpy(k + key * k_row_stride, &problem.k[static_cast<std::size_t>(key) * 64],
                  row_bytes);
      device.define(k + key * k_row_stride, row_bytes);
    }
    return k;
  }

  template <Planted planted>
  Outcome run(const Options& options, int compute_capability = 80) const {
    Device device;
    float* out = device.buffer<float>("out", static_cast<std::size_t>(problem.rows) * 64);
    const guest80::Params params{.q = device.buffer("q", problem.q),
                                 .k = spread_k(device),
                                 .v = device.buffer("v", problem.v),
                                 .out = out,
                                 .k_row_stride = k_row_stride,
                                 .seqlen_kv = problem.keys,
                                 .softmax_scale_log2 = problem.scale_log2()};
    const LaunchConfig config{.grid = {kCtas, 1, 1},
                              .block = {guest80::kThreads, 1, 1},
                              .shared_bytes = guest80::kSharedBytes,
                              .compute_capability = compute_capability};
    Report report = device.launch(config, options, [&] { guest80::attention<planted>(params); });
    const double error = problem.error(out);
    return {std::move(report), error};
  }

  template <Planted planted>
  Report find() const {
    return sweep(3, [&](const Options& options) { return run<planted>(options).report; });
  }
};

template <Planted planted>
void expect_fault(Fault fault, const Guest& guest = Guest()) {
  const Report report = guest.find<planted>();
  EXPECT_TRUE(report.has(fault)) << name(fault) << " expected\n" << report.text();
}

// What the hardware would compute as well: only the numbers tell.
template <Planted planted>
void expect_wrong_numbers() {
  const Outcome outcome = Guest().run<planted>({});
  EXPECT_GT(outcome.error, kAllowedError) << outcome.report.text();
}

TEST(Sm80Faults, RightKernelIsCleanOverSeeds) {
  const Guest guest;
  const Report report = sweep(200, [&](const Options& options) {
    Outcome outcome = guest.run<Planted::nothing>(options);
    EXPECT_LT(outcome.error, kAllowedError) << "seed " << options.seed;
    return std::move(outcome.report);
  });
  EXPECT_EQ(report.text(), "");
}

TEST(Sm80Faults, InstructionsThatTuringLacksAreNamed) {
  const Report report = Guest().run<Planted::nothing>({}, 75).report;
  ASSERT_TRUE(report.has(Fault::architecture)) << report.text();
  for (const char* name :
       {"cp.async", "cp.async.commit_group", "cp.async.wait_group", "mma.sync"}) {
    EXPECT_NE(
        report.text().find(std::string(name) + " needs compute capability 8.0; the GPU has 7.5"),
        std::string::npos)
        << report.text();
  }
}

TEST(Sm80Faults, MissingWaitGroupIsARace) {
  expect_fault<Planted::wait_group_missing>(Fault::race);
}

TEST(Sm80Faults, WaitForOneGroupTooFewIsARace) {
  expect_fault<Planted::wait_group_one_too_late>(Fault::race);
}

TEST(Sm80Faults, MissingCommitGroupIsARace) {
  expect_fault<Planted::commit_group_missing>(Fault::race);
}

TEST(Sm80Faults, MissingBarrierAfterTheWaitIsARace) {
  expect_fault<Planted::barrier_after_wait_missing>(Fault::race);
}

TEST(Sm80Faults, MissingBarrierBeforeAStageIsUsedAgainIsARace) {
  expect_fault<Planted::barrier_before_reuse_missing>(Fault::race);
}

TEST(Sm80Faults, BarrierThatAWarpSkipsIsADeadlock) {
  expect_fault<Planted::barrier_skipped_by_a_warp>(Fault::deadlock);
}

TEST(Sm80Faults, WrongBarrierCountIsNamed) {
  expect_fault<Planted::barrier_count_wrong>(Fault::barrier_count);
}

TEST(Sm80Faults, SwizzleThatDiffersGivesWrongNumbers) {
  expect_wrong_numbers<Planted::swizzle_differs>();
}

TEST(Sm80Faults, MissingTransposeGivesWrongNumbers) {
  expect_wrong_numbers<Planted::transposed_load_missing>();
}

TEST(Sm80Faults, UnmaskedTailGivesWrongNumbers) { expect_wrong_numbers<Planted::tail_unmasked>(); }

TEST(Sm80Faults, ScaleAppliedTwiceGivesWrongNumbers) {
  expect_wrong_numbers<Planted::scale_applied_twice>();
}

TEST(Sm80Faults, ForgottenRescaleGivesWrongNumbers) {
  expect_wrong_numbers<Planted::rescale_forgotten>();
}

TEST(Sm80Faults, RowsBeyondTheEndAreOutOfBounds) {
  expect_fault<Planted::tail_rows_read>(Fault::out_of_bounds);
}

TEST(Sm80Faults, RowsThatNobodyFilledAreUninitialised) {
  // With two tiles the tail's stage holds no older tile.
  expect_fault<Planted::tail_rows_not_filled>(Fault::uninitialised, Guest(38));
}

// Row 32 of K begins 2^31 elements on: as 32 bits, before the buffer.
TEST(Sm80Faults, OffsetOf32BitsIsOutOfBounds) {
  const Guest far(kKeys, std::int64_t{1} << 26);
  const Outcome right = far.run<Planted::nothing>({});
  EXPECT_EQ(right.report.text(), "");
  EXPECT_LT(right.error, kAllowedError);
  expect_fault<Planted::offset_of_32_bits>(Fault::out_of_bounds, far);
}

TEST(Sm80Faults, MisalignedRowAddressIsNamed) {
  expect_fault<Planted::ldmatrix_misaligned>(Fault::misaligned);
}

TEST(Sm80Faults, TileBeyondSharedMemoryIsOutOfBounds) {
  expect_fault<Planted::tile_beyond_shared>(Fault::out_of_bounds);
}

TEST(Sm80Faults, LanesThatDivergeAtLdmatrixAreNamed) {
  expect_fault<Planted::lanes_diverge>(Fault::divergence);
}

TEST(Sm80Faults, MissingWarpSyncIsARace) { expect_fault<Planted::warp_sync_missing>(Fault::race); }

TEST(Sm80Faults, CtasThatWriteOneRowRace) {
  expect_fault<Planted::ctas_write_one_row>(Fault::race);
}

}  // namespace
}  // namespace fovea::cuda::emulator
