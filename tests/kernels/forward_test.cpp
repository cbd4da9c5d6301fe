// The kernels of sm_80 under the emulator, on the feature matrix, against the oracle: what every access may do is
// checked beside.
#include "problem/forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "cuda/device/shared/split.h"
#include "cuda/forward/attention_forward.hpp"
#include "kernels/each_landing.hpp"
#include "kernels/emulation.hpp"
#include "kernels/forward_cases.hpp"
#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "support/cache_case.hpp"
#include "support/compare.hpp"
#include "support/kernel_compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

void expect_equals_oracle(const Case& problem, Runner run, const cuda::DeviceTraits& device) {
  for_each_landing([&](Emulation& emulation) {
    expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
      run_args(run, problem.label, args, device, emulation);
    });
  });
}

class EmulatedHoppers : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedHoppers, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_hopper, sectioned_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHoppers, ::testing::ValuesIn(hopper_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Copied, EmulatedHoppers, ::testing::ValuesIn(hopper_cp_async_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(F32Out, EmulatedHoppers, ::testing::ValuesIn(hopper_f32_out_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Selections, EmulatedHoppers, ::testing::ValuesIn(hopper_selection_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(FewRows, EmulatedHoppers, ::testing::ValuesIn(hopper_few_rows_cases()),
                         [](const auto& each) { return each.param.label; });

/// Beside scores of 2^127 the usual tolerances allow anything: each row is a plain average of its greatest scores or of
/// ordinary ones.
void expect_exact_rows(const AttentionForward& args) {
  const reference::ForwardResult expected = reference::attention_forward(args);
  // Weights' rounding of values up to 8; a rounding of lse is added to its own.
  const double of_weights = args.q.dtype() == Dtype::f32 ? 0x1p-20 : 0x1p-8;
  const Tolerance out{.dtype = args.out.dtype(), .absolute = 8 * of_weights, .norm = HUGE_VAL};
  const Tolerance lse{.dtype = Dtype::f32, .absolute = 0x1p-14, .norm = HUGE_VAL};
  EXPECT_EQ(difference({"out", args.out, expected.out, out}), "");
  EXPECT_EQ(difference({"lse", args.lse, expected.lse, lse}), "");
}

void expect_exact_rows_of(const std::vector<Case>& cases, Runner run,
                          const cuda::DeviceTraits& device) {
  for (const Case& problem : cases) {
    if (problem.label.find("extreme") == std::string::npos) continue;
    SCOPED_TRACE(problem.label);
    CaseMemory memory(problem);
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    Emulation emulation;
    run_args(run, problem.label, args, device, emulation);
    EXPECT_EQ(emulation.findings, "");
    expect_exact_rows(args);
  }
}

TEST(ExtremeScores, AreOrdinaryNumbers) {
  expect_exact_rows_of(kernel_cases(), run_emulated, cuda::typical_device(8, 0));
}

TEST(ExtremeScores, AreOrdinaryNumbersInDecode) {
  expect_exact_rows_of(decode_cases(), run_decode, cuda::typical_device(9, 0));
}

TEST(ExtremeScores, AreOrdinaryNumbersOnHopper) {
  expect_exact_rows_of(hopper_cases(), run_hopper, sectioned_hopper());
  expect_exact_rows_of(hopper_few_rows_cases(), run_hopper, sectioned_hopper());
  expect_exact_rows_of(short_cases(), run_short, small_hopper());
}

TensorView columns_from(const TensorView& t, std::int64_t first) {
  TensorSpec spec = t.spec();
  const auto last = static_cast<std::size_t>(t.rank() - 1);
  spec.shape[last] -= first;
  return {static_cast<const std::uint16_t*>(t.data()) + first * spec.strides[last], spec};
}

class RowTilesComputedAgain : public ::testing::TestWithParam<const char*> {};

/// Infinity and NaN are in the first four columns of V; rows see them or not.
TEST_P(RowTilesComputedAgain, ChangeNoBitOfOtherColumns) {
  const std::vector<Case> cases = hopper_cases();
  const Case& problem = *std::ranges::find(cases, std::string(GetParam()), &Case::label);
  const auto run = [](const Case& each, auto&& visit) {
    CaseMemory memory(each);
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    Emulation emulation;
    run_args(run_hopper, each.label, args, sectioned_hopper(), emulation);
    EXPECT_EQ(emulation.findings, "");
    EXPECT_EQ(emulation.num_redone > 0, each.has_infinite_values);
    visit(args);
  };
  Case plain = problem;
  plain.has_infinite_values = false;
  std::vector<std::uint64_t> out, lse;
  run(plain, [&](const AttentionForward& args) {
    out = bits_of(columns_from(args.out, 4));
    lse = bits_of(args.lse);
  });
  run(problem, [&](const AttentionForward& args) {
    EXPECT_EQ(bits_of(columns_from(args.out, 4)), out);
    EXPECT_EQ(bits_of(args.lse), lse);
  });
}

INSTANTIATE_TEST_SUITE_P(All, RowTilesComputedAgain,
                         ::testing::Values("hopper_infinite_d64", "hopper_infinite_d128",
                                           "hopper_infinite_d256", "hopper_infinite_line",
                                           "hopper_infinite_dropout_d128"),
                         [](const auto& each) { return std::string(each.param); });

/// Rows of four kinds, by their number: scores climb by 210 octaves a tile as the walk goes, hardly move, descend, or
/// climb far below 0. Heads have the same queries.
void fill_climbing_rows(CaseMemory& memory) {
  const TensorView q = memory.q.view(), k = memory.k.view();
  const auto noise = [](std::int64_t i) { return 0.1 * std::sin(1.7 * static_cast<double>(i)); };
  constexpr std::int64_t kClimb[][2] = {{16, 0}, {1, 0}, {-16, 0}, {16, 16}};
  for (std::int64_t head = 0; head < q.size(2); ++head) {
    for (std::int64_t row = 0; row < q.size(1); ++row) {
      for (std::int64_t col = 0; col < q.size(3); ++col) {
        const double value =
            col < 2 ? static_cast<double>(kClimb[row % 4][col]) : noise(row * q.size(3) + col);
        memory.q.set(row * q.stride(1) + head * q.stride(2) + col * q.stride(3), value);
      }
    }
  }
  for (std::int64_t row = 0; row < k.size(1); ++row) {
    const std::int64_t tile = (k.size(1) - 1 - row) / 128;  // as they are visited
    for (std::int64_t col = 0; col < k.size(3); ++col) {
      const double octaves = col == 0 ? 210. * static_cast<double>(tile) : -2000.;
      memory.k.set(row * k.stride(1) + col * k.stride(3),
                   col < 2 ? octaves * std::numbers::ln2 / 16 : noise(1000 + row * 7 + col));
    }
  }
  memory.q.seal();
  memory.k.seal();
}

class ClimbingRows : public ::testing::TestWithParam<const char*> {};

/// The first row tile of a CTA takes optimistic steps, each of which is repaired; so those behind it are careful.
TEST_P(ClimbingRows, HaveTheSameBitsByEitherKindOfStep) {
  const std::vector<Case> cases = hopper_cases();
  Case problem = *std::ranges::find(cases, std::string(GetParam()), &Case::label);
  problem.seqlen_q = 64;
  problem.seqlen_kv = 5 * 128;
  problem.num_heads_q = 4;
  problem.softmax_scale = 1;
  CaseMemory memory(problem);
  fill_climbing_rows(memory);
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  Emulation emulation;
  run_args(run_hopper, problem.label, args, sectioned_hopper(), emulation);
  EXPECT_EQ(emulation.findings, "");
  const reference::ForwardResult expected = reference::attention_forward(args);
  const Tolerances allowed = tolerances(args, expected, ComputeDtype::bf16);
  EXPECT_EQ(difference({"out", args.out, expected.out, allowed.out}), "");
  EXPECT_EQ(difference({"lse", args.lse, expected.lse, allowed.lse}), "");
  const auto head = [](const TensorView& t, std::size_t axis, std::int64_t i) {
    TensorSpec spec = t.spec();
    spec.shape[axis] = 1;
    const std::int64_t begin =
        i * spec.strides[axis] * static_cast<std::int64_t>(size_bytes(spec.dtype));
    return bits_of(TensorView(static_cast<const std::byte*>(t.data()) + begin, spec));
  };
  for (std::int64_t i = 1; i < problem.num_heads_q; ++i) {
    EXPECT_EQ(head(args.out, 2, i), head(args.out, 2, 0)) << i;
    EXPECT_EQ(head(args.lse, 1, i), head(args.lse, 1, 0)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ClimbingRows,
                         ::testing::Values("hopper_full_d64", "hopper_full_d128",
                                           "hopper_full_d256"),
                         [](const auto& each) { return std::string(each.param); });

class EmulatedForwards : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedForwards, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_emulated, cuda::typical_device(8, 0));
}

class EmulatedOnTuring : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedOnTuring, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_emulated, cuda::typical_device(7, 5));
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedOnTuring, ::testing::ValuesIn(turing_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedShorts : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedShorts, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_short, small_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedShorts, ::testing::ValuesIn(short_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedHopperShorts : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedHopperShorts, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_hopper_short, small_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHopperShorts, ::testing::ValuesIn(hopper_short_cases()),
                         [](const auto& each) { return each.param.label; });

/// Each packed sequence as the only one that cu_seqlens names, planned for the same lengths.
TEST(ShortSequences, HaveTheBitsOfOneAlone) {
  const std::vector<Case> cases = short_cases();
  const Case& problem = *std::ranges::find(cases, "short_packed_d64", &Case::label);
  const auto run = [&](const AttentionForward& args) {
    Emulation emulation;
    run_args(run_short, problem.label, args, small_hopper(), emulation);
    EXPECT_EQ(emulation.findings, "");
  };
  CaseMemory together(problem);
  const AttentionForward all = together.args();
  run(all);
  std::int64_t begin = 0;
  for (std::int64_t i = 0; i < problem.num_sequences(); ++i) {
    const std::int64_t rows = problem.lengths(i).q;
    CaseMemory alone(problem);
    AttentionForward one = alone.args();
    one.cu_seqlens_q = entry_of(one.cu_seqlens_q, i, 2);
    one.cu_seqlens_kv = entry_of(one.cu_seqlens_kv, i, 2);
    run(one);
    EXPECT_EQ(bits_of(entry_of(one.out, begin, rows)), bits_of(entry_of(all.out, begin, rows)))
        << i;
    begin += rows;
  }
}

/// One SM of two is left free: CTAs take other tiles and splits, and more of them.
TEST(SmMargin, ChangesNoBit) {
  const auto expect_bits = [](const Case& problem, Runner run) {
    const auto bits_with = [&](int sm_margin) {
      CaseMemory memory(problem);
      memory.poison_outputs();
      AttentionForward args = memory.args();
      args.sm_margin = sm_margin;
      Emulation emulation;
      run_args(run, problem.label, args, sectioned_hopper(), emulation);
      EXPECT_EQ(emulation.findings, "");
      return bits_of(args.out);
    };
    EXPECT_EQ(bits_with(1), bits_with(0)) << problem.label;
  };
  expect_bits(hopper_cases().front(), run_hopper);
  expect_bits(hopper_few_rows_cases().front(), run_hopper);
  expect_bits(decode_cases().front(), run_decode);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedForwards, ::testing::ValuesIn(kernel_cases()),
                         [](const auto& each) { return each.param.label; });

/// Around the lanes of a warp, which count sequences, and around twice as many; 257 are among the cases.
void expect_many_sequences(const std::string& label, const std::vector<Case>& cases, Runner run,
                           const cuda::DeviceTraits& device) {
  for (const std::int64_t count : {31, 32, 33, 65}) {
    SCOPED_TRACE(label + ", sequences: " + std::to_string(count));
    Case problem = *std::ranges::find(cases, label, &Case::label);
    problem.sequences = many_sequences(count);
    expect_equals_oracle(problem, run, device);
  }
}

/// Behind the last row of a sequence a row tile has the first ones of the next, here with scores that leave no power
/// right: they may not have the tile computed again by other references.
TEST(PackedForwards, BitsDoNotDependOnTheNextSequence) {
  constexpr std::int64_t kRows = 70;
  for (const char* label : {"hopper_packed_d128", "hopper_packed_d64", "hopper_packed_d256"}) {
    const std::vector<Case> cases = hopper_cases();
    Case problem = *std::ranges::find(cases, std::string(label), &Case::label);
    problem.sequences = {{kRows, 101}, {60, 90}};
    const auto bits_beside = [&](double factor) {
      CaseMemory memory(problem);
      const TensorView q = memory.q.view();
      for (std::int64_t row = kRows; row < q.size(0); ++row) {
        for (std::int64_t head = 0; head < q.size(1); ++head) {
          for (std::int64_t col = 0; col < q.size(2); ++col) {
            const std::int64_t at = row * q.stride(0) + head * q.stride(1) + col * q.stride(2);
            memory.q.set(at, factor * reference::element(q, at));
          }
        }
      }
      memory.q.seal();
      memory.poison_outputs();
      const AttentionForward args = memory.args();
      Emulation emulation;
      run_args(run_hopper, problem.label, args, sectioned_hopper(), emulation);
      EXPECT_EQ(emulation.findings, "");
      TensorSpec first = args.out.spec();
      first.shape[0] = kRows;
      return bits_of(TensorView(args.out.data(), first));
    };
    EXPECT_EQ(bits_beside(1e16), bits_beside(1)) << label;
  }
}

TEST(PackedForwards, FindTheRowsOfManySequences) {
  expect_many_sequences("packed_many", kernel_cases(), run_emulated, cuda::typical_device(8, 0));
  expect_many_sequences("hopper_packed_many", hopper_cases(), run_hopper, sectioned_hopper());
}

class EmulatedCachesOnTuring : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedCachesOnTuring, EqualTheOracle) {
  Emulation emulation;
  expect_cache_equals_oracle(GetParam(), run_emulated, cuda::typical_device(7, 5), emulation);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedCachesOnTuring, ::testing::ValuesIn(turing_cache_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedCaches : public ::testing::TestWithParam<NamedCacheCase> {};

/// Each sequence against the oracle on its keys laid out densely.
TEST_P(EmulatedCaches, EqualTheOracle) {
  Emulation emulation;
  expect_cache_equals_oracle(GetParam(), run_emulated, cuda::typical_device(8, 0), emulation);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedCaches, ::testing::ValuesIn(kernel_cache_cases()),
                         [](const auto& each) { return each.param.label; });

INSTANTIATE_TEST_SUITE_P(Coded, EmulatedCaches, ::testing::ValuesIn(coded_cache_cases()),
                         [](const auto& each) { return each.param.label; });

/// Chunks of prompts beside single tokens, as a plan of two parts runs them: each sequence by one of two kernels.
TEST(PackedCaches, OfTwoPartsEqualTheOracle) {
  const std::vector<NamedCacheCase> cases = kernel_cache_cases();
  const std::string rest_label = "packed_chunks", few_label = "packed_decode";
  const CacheCase problem = std::ranges::find(cases, rest_label, &NamedCacheCase::label)->problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  CacheCall call(problem, decode);
  append_to_cache({.cache = decode.cache, .append = call.append});
  const cuda::DeviceTraits device = cuda::typical_device(8, 0);
  const cuda::ForwardPlan plan = cuda::choose_in_parts(call.problem, device);
  ASSERT_NE(plan.few, nullptr);
  EXPECT_TRUE(plan.few->plan.spec->is_split);
  EXPECT_EQ(plan.few->problem.seqlen_q, 16 / call.problem.group);
  EXPECT_GE(plan.workspace_bytes, plan.few->workspace_at + plan.few->plan.workspace_bytes);
  for (const auto& [label, part] :
       {std::pair{&few_label, &plan.few->problem}, {&rest_label, &plan.few->rest}}) {
    Emulation emulation;
    call.problem = *part;
    run_emulated(call.on(*label, device), emulation);
    EXPECT_EQ(emulation.findings, "");
  }
  expect_sequences_equal_oracle(problem, memory, decode);
}

class EmulatedHopperCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedHopperCaches, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_hopper, sectioned_hopper(), emulation);
    if (!GetParam().problem.packed_q.empty()) return;  // queries of nobody are NaN
    EXPECT_EQ(emulation.num_redone > 0, GetParam().problem.nan_key >= 0)
        << "what lies behind the last key is no reason to compute again";
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHopperCaches, ::testing::ValuesIn(hopper_cache_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Copied, EmulatedHopperCaches,
                         ::testing::ValuesIn(hopper_copied_cache_cases()),
                         [](const auto& each) { return each.param.label; });
class EmulatedChunksOverCodes : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedChunksOverCodes, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_chunk_over_codes, sectioned_hopper(), emulation);
    if (!GetParam().problem.packed_q.empty()) return;  // queries of nobody are NaN
    EXPECT_EQ(emulation.num_redone > 0, GetParam().problem.nan_key >= 0)
        << "what lies behind the last key is no reason to compute again";
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedChunksOverCodes, ::testing::ValuesIn(hopper_chunk_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Converted, EmulatedChunksOverCodes,
                         ::testing::ValuesIn(hopper_converted_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(FewRows, EmulatedHopperCaches,
                         ::testing::ValuesIn(hopper_few_rows_cache_cases()),
                         [](const auto& each) { return each.param.label; });

class EmulatedDecodes : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedDecodes, EqualTheOracle) {
  expect_equals_oracle(GetParam(), run_decode, small_hopper());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedDecodes, ::testing::ValuesIn(decode_cases()),
                         [](const auto& each) { return each.param.label; });

/// Kernels that stream a cache, by the name of the case.
void run_streaming(const Run& run, Emulation& emulation) {
  const Runner runner = run.label.starts_with("latent")         ? run_latent
                        : run.label.starts_with("coded")        ? run_emulated
                        : run.label.starts_with("hopper_coded") ? run_decode_coded
                                                                : run_decode;
  runner(run, emulation);
}

/// Of so many SMs: Hopper, or one before it whose kernel for codes the case is of.
cuda::DeviceTraits streaming_device(const NamedCacheCase& each, int num_sms) {
  cuda::DeviceTraits device =
      each.label.starts_with("coded") ? cuda::typical_device(8, 0) : cuda::typical_device(9, 0);
  device.num_sms = num_sms;
  return device;
}

class EmulatedDecodeCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedDecodeCaches, EqualTheOracle) {
  for_each_landing([](Emulation& emulation) {
    expect_cache_equals_oracle(GetParam(), run_streaming, streaming_device(GetParam(), 2),
                               emulation);
  });
}

/// What CTAs of so many take of sequences that are all as long, with a row tile of each kv head.
cuda::Unit unit_on(int num_ctas, const Case& problem) {
  const auto pairs = static_cast<float>(problem.batch * problem.num_heads_kv);
  const auto keys = static_cast<int>(problem.seqlen_kv);
  const float share = pairs * static_cast<float>(keys) / static_cast<float>(num_ctas);
  return cuda::unit_of(keys, /*most_splits=*/16, {.keys = share, .is_even = true});
}

/// Whoever folds the splits of a group, and groups: on few SMs a CTA has all of a sequence, on many a split.
TEST(DecodedGroups, HaveTheBitsOfSplits) {
  const std::vector<Case> cases = decode_cases();
  std::map<std::string, std::set<cuda::Unit>> units;
  for (const Case& groups : cases) {
    const std::size_t word = groups.label.find("groups");
    if (word == std::string::npos) continue;
    std::string label = groups.label;
    const Case& splits = *std::ranges::find(cases, label.replace(word, 6, "splits"), &Case::label);
    const Case& cluster =
        *std::ranges::find(cases, label.replace(word, 6, "cluster"), &Case::label);
    CaseMemory by_splits(splits), by_cluster(cluster);
    Emulation of_splits, of_cluster;
    run_args(run_decode, splits.label, by_splits.args(), small_hopper(), of_splits);
    run_args(run_decode, cluster.label, by_cluster.args(), small_hopper(), of_cluster);
    EXPECT_EQ(bits_of(by_cluster.args().out), bits_of(by_splits.args().out)) << cluster.label;
    EXPECT_EQ(bits_of(by_cluster.args().lse), bits_of(by_splits.args().lse)) << cluster.label;
    for (const int num_sms : {1, 2, 6}) {
      SCOPED_TRACE(groups.label + " on SMs: " + std::to_string(num_sms));
      cuda::DeviceTraits device = small_hopper();
      device.num_sms = num_sms;
      CaseMemory by_groups(groups);
      Emulation emulation;
      run_args(run_decode, groups.label, by_groups.args(), device, emulation);
      EXPECT_EQ(bits_of(by_groups.args().out), bits_of(by_splits.args().out));
      EXPECT_EQ(bits_of(by_groups.args().lse), bits_of(by_splits.args().lse));
      units[groups.label].insert(unit_on(num_sms, groups));
    }
  }
  const std::set all = {cuda::Unit::split, cuda::Unit::group, cuda::Unit::sequence};
  EXPECT_EQ(units["few_rows_groups"], all);
  EXPECT_EQ(units["few_rows_groups_extreme"], all);
  EXPECT_EQ(units["few_rows_groups_of_63"], all);
  const std::set of_one_group = {cuda::Unit::split, cuda::Unit::sequence};
  EXPECT_EQ(units["few_rows_groups_infinite_values"], of_one_group);
  EXPECT_EQ(units["few_rows_groups_of_17_infinite_values"], of_one_group);
  EXPECT_EQ(units.size(), 5);
}

TEST(DecodedGroups, OfCodesHaveTheBitsOfSplits) {
  const std::vector<NamedCacheCase> cases = hopper_coded_cases();
  for (const std::string of_rows : {"hopper_coded_", "hopper_coded_many_rows_"}) {
    std::vector<std::vector<std::uint64_t>> outs, lses;
    for (const char* units : {"groups", "splits"}) {
      const NamedCacheCase& each =
          *std::ranges::find(cases, of_rows + units, &NamedCacheCase::label);
      CacheMemory memory(each.problem);
      const AttentionDecode decode = memory.args();
      const CacheCall call(each.problem, decode);
      Emulation emulation;
      run_decode_coded(call.on(each.label, small_hopper()), emulation);
      outs.push_back(bits_of(decode.out));
      lses.push_back(bits_of(decode.lse));
    }
    EXPECT_EQ(outs[0], outs[1]);
    EXPECT_EQ(lses[0], lses[1]);
  }
}

/// Splits are counted 32 sequences at a time; two sequences have several.
TEST(DecodedBatches, FindTheSplitsOfManySequences) {
  const std::vector<NamedCacheCase> cases = decode_cache_cases();
  NamedCacheCase each = *std::ranges::find(cases, "decode_pages_of_64", &NamedCacheCase::label);
  for (const std::int64_t count : {33, 65, 257}) {
    SCOPED_TRACE("sequences: " + std::to_string(count));
    each.problem.seqlens.clear();
    for (std::int64_t i = 0; i < count; ++i)
      each.problem.seqlens.push_back(i == 3 || i == count - 2 ? 523 : i * 7 % 19);
    Emulation emulation;
    expect_cache_equals_oracle(each, run_decode, small_hopper(), emulation);
  }
}

/// The same bits in a batch, on a device of another size, as alone.
TEST_P(EmulatedDecodeCaches, BitsDoNotDependOnTheBatch) {
  const NamedCacheCase& each = GetParam();
  CacheMemory together(each.problem), alone(each.problem);
  for (CacheMemory* memory : {&together, &alone}) {
    const AttentionDecode decode = memory->args();
    const CacheCall call(each.problem, decode);
    if (each.problem.appends()) append_to_cache({.cache = decode.cache, .append = call.append});
  }
  const auto run = [&each](const AttentionDecode& decode, const cuda::DeviceTraits& device) {
    const CacheCall call(each.problem, decode);
    Emulation emulation;
    run_streaming(call.on(each.label, device), emulation);
  };
  run(together.args(), streaming_device(each, 2));
  for (std::int64_t i = 0; i < each.problem.batch(); ++i) {
    run(testing::alone(alone.args(), i), streaming_device(each, 132));
    EXPECT_EQ(together.out_bits(i), alone.out_bits(i)) << i;
    EXPECT_EQ(together.lse_bits(i), alone.lse_bits(i)) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedDecodeCaches, ::testing::ValuesIn(decode_cache_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Coded, EmulatedDecodeCaches, ::testing::ValuesIn(coded_decode_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(HopperCoded, EmulatedDecodeCaches,
                         ::testing::ValuesIn(hopper_coded_cases()),
                         [](const auto& each) { return each.param.label; });
INSTANTIATE_TEST_SUITE_P(Latent, EmulatedDecodeCaches, ::testing::ValuesIn(latent_cache_cases()),
                         [](const auto& each) { return each.param.label; });

/// Rows that sums which are not finite send another way would get other bits.
TEST(LatentCaches, WhatLiesBehindTheLastKeyChangesNoBit) {
  const NamedCacheCase each = latent_cache_cases().front();
  const auto run = [&each](CacheMemory& memory) {
    const AttentionDecode decode = memory.args();
    const CacheCall call(each.problem, decode);
    Emulation emulation;
    run_latent(call.on(each.label, small_hopper()), emulation);
    return std::pair(bits_of(decode.out), bits_of(decode.lse));
  };
  CacheMemory poisoned(each.problem), clean(each.problem);
  const TensorView k = clean.k.mutable_view();
  for (std::int64_t i = 0; i < k.size(0) * k.stride(0); ++i) {
    std::uint16_t& bits = static_cast<std::uint16_t*>(k.mutable_data())[i];
    if ((bits & 0x7f80U) == 0x7f80U) bits = 0;
  }
  EXPECT_EQ(run(clean), run(poisoned));
}

class EmulatedLatents : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedLatents, EqualTheOracle) {
  const Case& problem = GetParam();
  for_each_landing([&](Emulation& emulation) {
    CaseMemory memory(problem);
    memory.poison_outputs();
    const AttentionForward args = with_latent_values(memory.args());
    run_args(run_latent, problem.label, args, small_hopper(), emulation);
    const reference::ForwardResult expected = reference::attention_forward(args);
    const Tolerances allowed = tolerances(args, expected, ComputeDtype::bf16);
    EXPECT_EQ(difference({"out", args.out, expected.out, allowed.out}), "");
    EXPECT_EQ(difference({"lse", args.lse, expected.lse, allowed.lse}), "");
    if (problem.wants_row_max) {
      EXPECT_EQ(difference({"row_max", args.row_max, expected.row_max, allowed.row_max}), "");
    }
    EXPECT_EQ(memory.damage(), "");
  });
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedLatents, ::testing::ValuesIn(latent_cases()),
                         [](const auto& each) { return each.param.label; });

}  // namespace
}  // namespace fovea::testing
