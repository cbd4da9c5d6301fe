// Planted mistakes of pairs of CTAs, scales and masked lanes in a product of the tensor core of sm_100, and of CTAs
// that share an SM's tensor memory. What products compute is the business of tests/conformance.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "cuda/emulator/emulator.hpp"
#include "emulator/guests/product_sm100.cuh"

namespace fovea::cuda::emulator {
namespace {

using guest100_product::Kernel;
using guest100_product::Masked;
using guest100_product::Plain;
using guest100_product::Planted;
using guest100_product::Scaled;

constexpr TensorProduct kBf16{.m = 128, .n = 64};
using OneCta = Plain<kBf16>;
using PairOf128 = Plain<TensorProduct{.m = 128, .n = 64, .cta_group = 2}>;
using PairOf256 = Plain<TensorProduct{.m = 256, .n = 64, .cta_group = 2}>;
using Mxfp8 = Scaled<ptx::Tcgen05ScaledKind::mxf8f6f4_block32,
                     ScaledTensorProduct{.kind = ptx::Tcgen05ScaledKind::mxf8f6f4_block32,
                                         .a = TensorType::e4m3,
                                         .b = TensorType::e4m3,
                                         .has_ue8m0_scales = true,
                                         .n = 64},
                     ScaledTensorProduct{.kind = ptx::Tcgen05ScaledKind::mxf8f6f4_block32,
                                         .a = TensorType::e4m3,
                                         .b = TensorType::e4m3,
                                         .has_ue8m0_scales = true,
                                         .n = 64,
                                         .a_scale_byte = 1,
                                         .b_scale_byte = 1}>;
using Nvfp4 = Scaled<ptx::Tcgen05ScaledKind::mxf4nvf4_block16, ScaledTensorProduct{.n = 64},
                     ScaledTensorProduct{.n = 64}>;

struct Outcome {
  Report report;
  std::vector<std::uint32_t> d;
};

/// Bytes that are small numbers as bf16, e4m3, e2m1 and as scales of either kind.
template <class Product, Planted planted = Planted::nothing>
Outcome run(const Options& options) {
  using Guest = Kernel<Product, planted>;
  constexpr int kCtas = Product::kGroup;
  Device device;
  const auto fill = [&](const char* name, int chunks, std::uint32_t first) {
    auto* words = device.buffer<std::uint32_t>(name, 4U * static_cast<unsigned>(chunks));
    for (int i = 0; i < 4 * chunks; ++i)
      words[i] = first + 0x0001'0001U * static_cast<std::uint32_t>(i % 7) + 0x0100U * (i % 3);
    device.define(words, 16U * static_cast<unsigned>(chunks));
    return reinterpret_cast<const ptx::U32x4*>(words);
  };
  const std::uint32_t sign = planted == Planted::scale_with_sign ? 0x80U : 0;
  const std::size_t count = std::size_t{kCtas} * 128 * Guest::kDColumns;
  auto* d = device.buffer<std::uint32_t>("d", count);
  const guest100_product::Params params{
      .a = fill("a", kCtas * Guest::kRows * 4, 0x3f80'3f80U),
      .b = fill("b", kCtas * Guest::kColumns * 4, 0x3f88'3f80U),
      .a_scales = fill("a_scales", kCtas * 32, 0x3038'3830U | sign),
      .b_scales = fill("b_scales", kCtas * 32, 0x3830'3038U),
      .d = d};
  const LaunchConfig config{.grid = {kCtas, 1, 1},
                            .block = {guest100_product::kThreads, 1, 1},
                            .cluster = {kCtas, 1, 1},
                            .shared_bytes = Guest::kSharedBytes};
  Report report =
      device.launch(config, options, [&] { guest100_product::product<Product, planted>(params); });
  return {std::move(report), {d, d + count}};
}

template <class Product, Planted planted>
Report find(TensorOrder order = TensorOrder::text) {
  return sweep(4, [&](Options options) {
    options.tensor_order = order;
    return run<Product, planted>(options).report;
  });
}

template <class Product, Planted planted>
void expect_fault(Fault fault) {
  const Report report = find<Product, planted>();
  EXPECT_TRUE(report.has(fault)) << name(fault) << " expected\n" << report.text();
}

template <class Product>
void expect_clean() {
  std::vector<std::uint32_t> first;
  for (const TensorOrder order : {TensorOrder::text, TensorOrder::pipe}) {
    const Report report = sweep(20, [&](Options options) {
      options.tensor_order = order;
      Outcome outcome = run<Product>(options);
      if (first.empty()) first = outcome.d;
      EXPECT_TRUE(outcome.d == first) << "seed " << options.seed;
      return std::move(outcome.report);
    });
    EXPECT_EQ(report.text(), "");
  }
}

TEST(Sm100Product, RightOnesAreCleanOverSeeds) {
  expect_clean<OneCta>();
  expect_clean<PairOf128>();
  expect_clean<PairOf256>();
  expect_clean<Mxfp8>();
  expect_clean<Nvfp4>();
  expect_clean<Masked<kBf16>>();
}

TEST(Sm100Product, AllocationBeforeThePeerRunsIsNamed) {
  expect_fault<PairOf256, Planted::alloc_before_the_peer_runs>(Fault::cluster_lifetime);
}

TEST(Sm100Product, IssueByBothCtasOfAPairIsNamed) {
  expect_fault<PairOf256, Planted::issued_by_both_ctas>(Fault::tensor_issue);
}

TEST(Sm100Product, CommitWithoutMulticastIsADeadlockOfThePeer) {
  expect_fault<PairOf256, Planted::commit_without_multicast>(Fault::deadlock);
}

TEST(Sm100Product, CommitToTheWrongRankIsADeadlock) {
  expect_fault<PairOf256, Planted::commit_to_the_wrong_rank>(Fault::deadlock);
}

TEST(Sm100Product, CommitOfNothingForAPairIsNamed) {
  expect_fault<PairOf256, Planted::commit_of_nothing>(Fault::tensor_issue);
}

TEST(Sm100Product, PeerThatLeavesUnderAProductIsARace) {
  expect_fault<PairOf256, Planted::peer_leaves_early>(Fault::race);
}

TEST(Sm100Product, OperandsThatThePeerDidNotStageAreNamed) {
  expect_fault<PairOf256, Planted::operands_of_one_cta>(Fault::uninitialised);
}

TEST(Sm100Product, ScalesInSomeQuartersOfTheLanesAreNamed) {
  expect_fault<Mxfp8, Planted::scales_by_another_quarter>(Fault::scale_factors);
}

TEST(Sm100Product, ScaleWithItsSignIsNamed) {
  expect_fault<Nvfp4, Planted::scale_with_sign>(Fault::scale_factors);
}

TEST(Sm100Product, WrongByteOfScalesIsNamedOrGivesWrongNumbers) {
  expect_fault<Nvfp4, Planted::scale_byte_wrong>(Fault::instruction_descriptor);
  const Outcome right = run<Mxfp8>({}), wrong = run<Mxfp8, Planted::scale_byte_wrong>({});
  EXPECT_EQ(wrong.report.text(), "");
  EXPECT_FALSE(right.d == wrong.d);
}

TEST(Sm100Product, CopyOverScalesInFlightIsARaceByTheText) {
  expect_fault<Mxfp8, Planted::copy_over_scales_in_flight>(Fault::race);
  EXPECT_EQ((find<Mxfp8, Planted::copy_over_scales_in_flight>(TensorOrder::pipe).text()), "");
}

TEST(Sm100Product, CopyOverACopyIsARaceByTheText) {
  expect_fault<Mxfp8, Planted::copy_over_a_copy>(Fault::race);
  EXPECT_EQ((find<Mxfp8, Planted::copy_over_a_copy>(TensorOrder::pipe).text()), "");
}

TEST(Sm100Product, ProductsOfTwoWarpsInOneAccumulatorAreARace) {
  expect_fault<OneCta, Planted::issued_by_two_warps>(Fault::race);
}

TEST(Sm100Product, CopyOfScalesWithoutAProxyFenceIsNamed) {
  expect_fault<Mxfp8, Planted::copy_of_unfenced_scales>(Fault::proxy_fence_missing);
}

TEST(Sm100Product, LaneThatNoProductWritesIsNamedWhereItIsRead) {
  expect_fault<Masked<kBf16>, Planted::masked_lane_read>(Fault::uninitialised);
}

/// Two CTAs of one SM, which holds 512 columns: each takes `first`, then `second` more.
template <int first, int second, bool gives_back>
void allocate_twice() {
  const ptx::SharedAddress word = ptx::dynamic_shared();
  ptx::tcgen05_alloc<first>(word);
  ptx::sync_threads();
  const ptx::TmemAddress address{ptx::ld_shared<std::uint32_t>(word)};
  if (gives_back) ptx::tcgen05_dealloc<first>(address);
  ptx::tcgen05_alloc<second>(word + 4);
  ptx::sync_threads();
  ptx::tcgen05_dealloc<second>({ptx::ld_shared<std::uint32_t>(word + 4)});
  if (!gives_back) ptx::tcgen05_dealloc<first>(address);
}

Report share_an_sm(const std::function<void()>& kernel) {
  return sweep(10, [&](const Options& options) {
    Device device;
    return device.launch({.grid = {2, 1, 1},
                          .block = {32, 1, 1},
                          .shared_bytes = 16,
                          .clusters_at_once = 2,
                          .ctas_per_sm = 2},
                         options, kernel);
  });
}

TEST(Sm100Allocation, WaitsForColumnsOfANeighbour) {
  EXPECT_EQ(share_an_sm(allocate_twice<512, 256, true>).text(), "");
  EXPECT_EQ(share_an_sm(allocate_twice<128, 128, false>).text(), "");
}

TEST(Sm100Allocation, TwoThatHoldHalfAndAskForMoreAreADeadlock) {
  const Report report = share_an_sm(allocate_twice<256, 256, false>);
  EXPECT_TRUE(report.has(Fault::deadlock)) << report.text();
  EXPECT_NE(report.text().find("of 512 are 512 taken"), std::string::npos) << report.text();
}

}  // namespace
}  // namespace fovea::cuda::emulator
