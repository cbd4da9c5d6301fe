// Attention of eight bits on Hopper under the emulator: its codes are the CPU's, its results the oracle's of the same
// recipe.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fovea/quantize.hpp"

#include "cuda/forward/quantize_kv.hpp"
#include "kernels/each_landing.hpp"
#include "kernels/emulated_forward.hpp"
#include "kernels/emulation.hpp"
#include "kernels/forward_cases.hpp"
#include "quant/groups.hpp"
#include "reference/attention_forward.hpp"
#include "support/compare.hpp"
#include "support/kernel_compare.hpp"
#include "support/launch_memory.hpp"
#include "support/long_run.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

Case case_named(const std::string& label) {
  const std::vector<Case> cases = hopper_quantized_cases();
  return *std::ranges::find(cases, label, &Case::label);
}

Case sm80_case_named(const std::string& label) {
  const std::vector<Case> cases = sm80_quantized_cases();
  return *std::ranges::find(cases, label, &Case::label);
}

void expect_equals_oracle(const Case& problem, Emulation& emulation) {
  expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
    run_args(run_quantized, problem.label, args, sectioned_hopper(), emulation);
  });
}

class EmulatedQuantized : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedQuantized, EqualsTheOracle) {
  Emulation emulation;
  emulation.options = {.seed = first_seed() + 1};
  expect_equals_oracle(GetParam(), emulation);
  EXPECT_EQ(emulation.findings, "");
}

void expect_sm80_equals_oracle(const Case& problem, const cuda::DeviceTraits& device,
                               Emulation& emulation) {
  expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
    run_args(run_sm80_quantized, problem.label, args, device, emulation);
  });
}

class EmulatedSm80Quantized : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedSm80Quantized, EqualsTheOracle) {
  Emulation emulation;
  emulation.options = {.seed = first_seed() + 1};
  expect_sm80_equals_oracle(GetParam(), rounding_device(GetParam().quant), emulation);
  EXPECT_EQ(emulation.findings, "");
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedSm80Quantized, ::testing::ValuesIn(sm80_quantized_cases()),
                         [](const auto& each) { return each.param.label; });

INSTANTIATE_TEST_SUITE_P(All, EmulatedQuantized, ::testing::ValuesIn(hopper_quantized_cases()),
                         [](const auto& each) { return each.param.label; });

TEST(EmulatedQuantized, EqualsTheOracleHoweverCopiesLand) {
  for_each_landing([](Emulation& emulation) {
    expect_equals_oracle(case_named("quantized_packed"), emulation);
  });
}

TEST(EmulatedQuantized, CodesOfProbabilitiesEqualTheOracleHoweverCopiesLand) {
  for_each_landing(
      [](Emulation& emulation) { expect_equals_oracle(case_named("coded_packed"), emulation); });
}

/// On a later GPU of the same sizes, whose kernels start while those before them end.
TEST(EmulatedSm80Quantized, EqualsTheOracleHoweverCopiesLand) {
  cuda::DeviceTraits device = cuda::typical_device(8, 0);
  device.major = 10;
  for_each_landing([&](Emulation& emulation) {
    expect_sm80_equals_oracle(sm80_case_named("rounded_few"), device, emulation);
  });
}

TEST(EmulatedSm80Quantized, CodesOfProbabilitiesEqualTheOracleHoweverCopiesLand) {
  const Case problem = sm80_case_named("summed_few");
  cuda::DeviceTraits device = rounding_device(problem.quant);
  device.major = 12;
  for_each_landing(
      [&](Emulation& emulation) { expect_sm80_equals_oracle(problem, device, emulation); });
}

/// Here values wait for the kernel before as well, and where scales are given nothing does.
TEST(EmulatedSm80Quantized, RoundedExponentialsEqualTheOracleHoweverCopiesLand) {
  for (const char* label : {"lanes_packed", "given_few"}) {
    const Case problem = sm80_case_named(label);
    cuda::DeviceTraits device = rounding_device(problem.quant);
    device.major = 12;
    for_each_landing(
        [&](Emulation& emulation) { expect_sm80_equals_oracle(problem, device, emulation); });
  }
}

// ---- caches ----

NamedCacheCase cache_case_named(const std::string& label) {
  const std::vector<NamedCacheCase> cases = hopper_rounded_cache_cases();
  return *std::ranges::find(cases, label, &NamedCacheCase::label);
}

/// Of codes of probabilities the smallest depend on the reference that a row begins with, and so does lse.
double lse_error_of(const Quantization& quant) {
  return quant.row_sums == RowSums::codes ? 4e-3 : 0;
}

class EmulatedRoundedCaches : public ::testing::TestWithParam<NamedCacheCase> {};

TEST_P(EmulatedRoundedCaches, EqualTheOracle) {
  const CacheCase& problem = GetParam().problem;
  Emulation emulation;
  emulation.options = {.seed = first_seed() + 1};
  expect_cache_equals_oracle(GetParam(), run_quantized, sectioned_hopper(), emulation,
                             lse_error_of(problem.quant));
  if (!problem.packed_q.empty()) return;  // queries of nobody are NaN
  EXPECT_EQ(emulation.num_redone > 0, problem.nan_key >= 0)
      << "what lies behind the last key is no reason to compute again";
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedRoundedCaches,
                         ::testing::ValuesIn(hopper_rounded_cache_cases()),
                         [](const auto& each) { return each.param.label; });

TEST(EmulatedRoundedCaches, EqualTheOracleHoweverCopiesLand) {
  const NamedCacheCase each = cache_case_named("hopper_rounded_packed");
  for_each_landing([&](Emulation& emulation) {
    expect_cache_equals_oracle(each, run_quantized, sectioned_hopper(), emulation,
                               lse_error_of(each.problem.quant));
  });
}

/// Keys and values of all sequences of a case, as packed tensors of the numbers that the cache holds.
struct PackedNumbers {
  GuardedTensor k, v, offsets;

  explicit PackedNumbers(const CacheCase& problem, CacheMemory& memory) {
    std::vector<double> begins{0};
    for (const std::int64_t length : problem.seqlens)
      begins.push_back(begins.back() + static_cast<double>(length));
    const auto total = static_cast<std::int64_t>(begins.back());
    offsets = GuardedTensor(make_spec(Dtype::i32, std::array{problem.batch() + 1}));
    offsets.fill([&](std::int64_t i) { return begins[static_cast<std::size_t>(i)]; });
    const auto packed = [&](std::int64_t head_dim) {
      return GuardedTensor(
          make_spec(problem.q_dtype, std::array{total, problem.num_heads_kv, head_dim}));
    };
    k = packed(problem.head_dim_qk);
    v = packed(problem.head_dim_v);
    std::int64_t k_at = 0, v_at = 0;
    for (std::int64_t i = 0; i < problem.batch(); ++i) {
      const AttentionForward dense = memory.dense(i);
      for (const double x : values_of(dense.k)) k.set(k_at++, x);
      for (const double x : values_of(dense.v)) v.set(v_at++, x);
    }
  }
};

/// The same recipe at the numbers that codes stand for gives the same bits: whichever pages they come from, and where
/// rows of queries and keys are not finite and multiplied as they are.
TEST(EmulatedRoundedCaches, HaveTheBitsOfTheirNumbers) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const NamedCacheCase each = cache_case_named("hopper_rounded_packed");
  const CacheCase& problem = each.problem;
  CacheMemory memory(problem);
  const AttentionDecode decode = memory.args();
  const CacheCall call(problem, decode);
  append_to_cache({.cache = decode.cache, .append = call.append});
  PackedNumbers numbers(problem, memory);
  // Of the first sequence, 300 keys: a query, which all its keys are multiplied by; a key and a head, which is NaN.
  memory.q.set(17 * decode.q.stride(0) + 3, kInfinity);
  constexpr std::int64_t kKey = 140;
  const std::int64_t page = index_at(decode.cache.page_table, 0, kKey / problem.page_size);
  const TensorView scales = memory.k_scale.view();
  memory.k_scale.set(page * scales.stride(0) + kKey % problem.page_size * scales.stride(1),
                     std::nan(""));
  for (std::int64_t d = 0; d < problem.head_dim_qk; ++d)
    numbers.k.set(kKey * problem.num_heads_kv * problem.head_dim_qk + d, std::nan(""));
  Emulation over_cache, over_numbers;
  run_quantized(call.on(each.label, sectioned_hopper()), over_cache);
  GuardedTensor out(decode.out.spec()), lse(decode.lse.spec());
  AttentionForward args{.q = decode.q,
                        .k = numbers.k.view(),
                        .v = numbers.v.view(),
                        .out = out.mutable_view(),
                        .lse = lse.mutable_view(),
                        .mask = problem.mask,
                        .sinks = decode.sinks};
  args.quant = problem.quant;
  args.cu_seqlens_q = decode.cu_seqlens_q;
  args.cu_seqlens_kv = numbers.offsets.view();
  run_args(run_quantized, "coded_packed", args, sectioned_hopper(), over_numbers);
  EXPECT_EQ(over_cache.findings + over_numbers.findings, "");
  EXPECT_EQ(bits_of(decode.lse), bits_of(lse.view()));
  EXPECT_EQ(bits_of(decode.out), bits_of(out.view()));
  const std::vector<double> statistics = values_of(decode.lse);
  EXPECT_TRUE(std::ranges::any_of(statistics, [](double x) { return std::isnan(x); }));
}

// ---- what rows hold ----

/// What the oracle makes of a call, and how far from it a kernel may be.
struct Expected {
  reference::ForwardResult result;
  Tolerances allowed;
};

/// Runs a call whose memory is not that of its case: out is the oracle's.
Expected expect_out(const AttentionForward& args, const Case& problem, Runner run,
                    const cuda::DeviceTraits& device) {
  Expected expected{reference::attention_forward(args), {}};
  Emulation emulation;
  run_args(run, problem.label, args, device, emulation);
  EXPECT_EQ(emulation.findings, "");
  expected.allowed = tolerances(args, expected.result, ComputeDtype::bf16);
  EXPECT_EQ(difference({"out", args.out, expected.result.out, expected.allowed.out}), "");
  return expected;
}

void expect_out_and_lse(const AttentionForward& args, const Case& problem, Runner run,
                        const cuda::DeviceTraits& device) {
  const Expected expected = expect_out(args, problem, run, device);
  EXPECT_EQ(difference({"lse", args.lse, expected.result.lse, expected.allowed.lse}), "");
}

/// NaN and infinities of either sign in rows of q and k, some of which others see. The first keys are seen by all.
void put_nonfinite(CaseMemory& memory) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto put = [](GuardedTensor& tensor, std::int64_t batch, std::int64_t row, double value) {
    const TensorView view = tensor.view();
    tensor.set(batch * view.stride(0) + row * view.stride(1) + 3 * view.stride(3), value);
  };
  put(memory.k, 0, 4, -kInfinity);
  put(memory.k, 1, 150, kInfinity);
  put(memory.k, 1, 201, std::numeric_limits<double>::quiet_NaN());
  put(memory.q, 0, 17, kInfinity);
  put(memory.q, 0, 130, std::numeric_limits<double>::quiet_NaN());
}

/// Those rows are not rounded: NaN reaches who sees them, a product of -inf hides a key.
void expect_given_products(Case problem, Runner run, const cuda::DeviceTraits& device) {
  SCOPED_TRACE(problem.label);
  problem.batch = 2;
  problem.seqlen_kv = 270;
  CaseMemory memory(problem);
  put_nonfinite(memory);
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  expect_out_and_lse(args, problem, run, device);
  EXPECT_TRUE(std::ranges::any_of(values_of(args.lse), [](double x) { return std::isnan(x); }));
  EXPECT_FALSE(std::ranges::all_of(values_of(args.lse), [](double x) { return std::isnan(x); }));
}

TEST(EmulatedQuantized, RowsThatAreNotFiniteAreMultipliedAsGiven) {
  // The last two meet them where no maximum is taken.
  for (const char* label :
       {"quantized_causal_d64", "quantized_softcap", "coded_causal_d128", "rotated_causal_d128",
        "coded_softcap", "coded_full_d128", "quantized_full_d64"})
    expect_given_products(case_named(label), run_quantized, sectioned_hopper());
}

TEST(EmulatedSm80Quantized, RowsThatAreNotFiniteAreMultipliedAsGiven) {
  for (const char* label :
       {"rounded_window_d64", "rounded_softcap", "summed_window_d64", "summed_softcap",
        "lanes_full_d64", "given_softcap", "codes_infinite"}) {
    const Case problem = sm80_case_named(label);
    expect_given_products(problem, run_sm80_quantized, rounding_device(problem.quant));
  }
}

/// From the tile that is visited third on scores are six octaves larger: codes by the reference of the first ones are
/// not numbers. All of them are near enough to each other to have the same codes by every reference.
void expect_rising_references(Case problem, Runner run, const cuda::DeviceTraits& device) {
  problem.seqlen_kv = 700;
  CaseMemory memory(problem);
  const auto noise = [](std::int64_t i) { return static_cast<double>(i * 7919 % 101 - 50) / 50; };
  const std::int64_t row = problem.num_heads_kv * problem.head_dim_qk;
  memory.q.fill([&](std::int64_t i) { return 1 + noise(i) / 8; });
  memory.k.fill([&](std::int64_t i) {
    const bool is_high = i / row % problem.seqlen_kv < 4 * cuda::kQuantizedTile;
    return noise(i) / 4 + (is_high ? 0.4 : 0);
  });
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  expect_out_and_lse(args, problem, run, device);
}

TEST(EmulatedQuantized, ReferencesRiseWhereScoresDo) {
  expect_rising_references(case_named("coded_full_d128"), run_quantized, sectioned_hopper());
}

TEST(EmulatedSm80Quantized, ReferencesRiseWhereScoresDo) {
  const Case problem = sm80_case_named("summed_full_d128");
  expect_rising_references(problem, run_sm80_quantized, rounding_device(problem.quant));
}

/// One key that weighs as much as a thousand average ones, in the tile that is visited first: its row's first reference
/// leaves no room, or the codes of all others would be 0.
TEST(EmulatedQuantized, AverageKeysCountBesideOneThatRules) {
  const Case problem = case_named("coded_full_d128");
  CaseMemory memory(problem);
  const auto noise = [](std::int64_t i) { return static_cast<double>(i * 7919 % 101 - 50) / 50; };
  const std::int64_t row = problem.num_heads_kv * problem.head_dim_qk;
  const std::int64_t ruler = problem.seqlen_kv - 8;
  const auto key_of = [&](std::int64_t i) { return i / row % problem.seqlen_kv; };
  memory.q.fill([&](std::int64_t i) { return 1 + noise(i) / 8; });
  memory.k.fill([&](std::int64_t i) { return noise(i) / 8 + (key_of(i) == ruler ? 0.65 : 0); });
  memory.v.fill([&](std::int64_t i) { return key_of(i) == ruler ? 0.0 : 1.0; });
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  AttentionForward exact = args;
  exact.quant = Quantization{};
  const reference::ForwardResult expected = reference::attention_forward(exact);
  Emulation emulation;
  run_args(run_quantized, problem.label, args, sectioned_hopper(), emulation);
  EXPECT_EQ(emulation.findings, "");
  Tolerance error_of_recipe = tolerances(args, expected, ComputeDtype::bf16).out;
  error_of_recipe.absolute = 0.03;  // of outputs of 0.3
  error_of_recipe.norm = std::numeric_limits<double>::infinity();
  EXPECT_EQ(difference({"out", args.out, expected.out, error_of_recipe}), "");
}

/// Σ (a - b)² / Σ b², its root.
double relative_error(const std::vector<double>& got, const std::vector<double>& exact) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += (got[i] - exact[i]) * (got[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(error / norm);
}

/// Out is the oracle's by this recipe, and nearer to attention without one than it would be without the field.
struct FieldThatPays {
  std::string without;
  double times;  // so much nearer
};
void expect_nearer(const AttentionForward& args, const Case& problem, Runner run,
                   const cuda::DeviceTraits& device, const FieldThatPays& field) {
  expect_out(args, problem, run, device);
  const auto oracle_by = [&](const Quantization& quant) {
    AttentionForward other = args;
    other.quant = quant;
    return reference::attention_forward(other).out;
  };
  const std::vector<double> exact = oracle_by({});
  const double without = relative_error(oracle_by(parse_quantization(field.without)), exact);
  EXPECT_LT(field.times * relative_error(values_of(args.out), exact), without);
}

/// Means of channels many times as large as what is left of V, of keys that end a tile or do not.
void expect_means_taken_off(Case problem, Runner run, const cuda::DeviceTraits& device,
                            const char* without) {
  SCOPED_TRACE(problem.label);
  for (const std::int64_t seqlen_kv : {127, 128, 129}) {
    problem.seqlen_kv = seqlen_kv;
    CaseMemory memory(problem);
    memory.v.fill([&](std::int64_t i) {
      const auto noise = static_cast<double>(i * 7919 % 101 - 50) / 50;
      return static_cast<double>(i % problem.head_dim_v % 5) * 6 - 9 + noise;
    });
    memory.poison_outputs();
    expect_nearer(memory.args(), problem, run, device, {without, 4});
  }
}

TEST(EmulatedQuantized, MeansOfValuesAreTakenOffAndGivenBack) {
  expect_means_taken_off(case_named("smooth_padded"), run_quantized, sectioned_hopper(), "fast");
}

TEST(EmulatedSm80Quantized, MeansOfValuesAreTakenOffAndGivenBack) {
  for (const auto& [label, without] :
       {std::pair{"smooth_lanes_causal_d128", "sage2"}, {"smooth_rows_padded", "fast"}}) {
    const Case problem = sm80_case_named(label);
    expect_means_taken_off(problem, run_sm80_quantized, rounding_device(problem.quant), without);
  }
}

/// Attention itself knows nothing of a rotation, so the kernels of other cases compute it, whatever their recipe.
TEST(EmulatedSm80Quantized, RotatedRowsEqualTheOracle) {
  for (const char* label : {"rounded_causal_d128", "rounded_packed", "rounded_padded",
                            "rounded_few", "rounded_by_elements", "lanes_full_d64", "given_few",
                            "groups_threads", "smooth_rows_full_d64"}) {
    Case problem = sm80_case_named(label);
    problem.quant.hadamard = true;
    if (problem.head_dim_qk % 2 != 0) problem.head_dim_qk = 28;  // four are mixed
    Emulation emulation;
    emulation.options = {.seed = first_seed() + 1};
    expect_sm80_equals_oracle(problem, rounding_device(problem.quant), emulation);
    EXPECT_EQ(emulation.findings, "") << label;
  }
}

/// One channel of q and one of k stand far above all others, of either sign.
void expect_outliers_spread(const Case& problem, Runner run, const cuda::DeviceTraits& device) {
  SCOPED_TRACE(problem.label);
  CaseMemory memory(problem);
  const auto number = [](std::uint64_t i) {
    const std::uint64_t bits = i * 0x9e3779b97f4a7c15U;
    return static_cast<double>((bits ^ bits >> 29U) % 2001) / 1000 - 1;
  };
  const auto fill = [&](GuardedTensor& tensor, std::int64_t outlier, std::uint64_t seed) {
    tensor.fill([&](std::int64_t i) {
      const double x = number(static_cast<std::uint64_t>(i) + seed);
      return i % problem.head_dim_qk == outlier ? 10 * x : x;
    });
  };
  fill(memory.q, 9, 1 << 20U);
  fill(memory.k, 3, 1 << 24U);
  memory.poison_outputs();
  Quantization without = problem.quant;
  without.hadamard = false;
  expect_nearer(memory.args(), problem, run, device, {print(without), 2});
}

TEST(EmulatedQuantized, RotationSpreadsOutliers) {
  expect_outliers_spread(case_named("rotated_causal_d128"), run_quantized, sectioned_hopper());
}

TEST(EmulatedSm80Quantized, RotationSpreadsOutliers) {
  Case problem = sm80_case_named("rounded_full_d128");
  problem.quant.hadamard = true;
  expect_outliers_spread(problem, run_sm80_quantized, rounding_device(problem.quant));
}

/// Between -1 and 1, of as many numbers as there may be elements.
double number_of(std::uint64_t i) {
  const std::uint64_t bits = i * 0x9e3779b97f4a7c15U;
  return static_cast<double>((bits ^ bits >> 29U) % 2001) / 1000 - 1;
}

/// Packed tensors have no batch.
void fill_rows(GuardedTensor& tensor, std::uint64_t seed,
               const std::function<double(std::int64_t row)>& size) {
  const TensorView view = tensor.view();
  const int rank = view.rank();
  const std::int64_t num_rows = view.size(rank - 3);
  const std::int64_t of_row = view.size(rank - 2) * view.size(rank - 1);
  tensor.fill([&](std::int64_t i) {
    return size(i / of_row % num_rows) * number_of(static_cast<std::uint64_t>(i) + seed);
  });
}

/// Scores of some `size`²; those of keys further on grow by 2^10, and fall again to a thousandth.
CaseMemory memory_of_scores(const Case& problem, double size) {
  CaseMemory memory(problem);
  fill_rows(memory.q, 1 << 20U, [&](std::int64_t) { return size; });
  fill_rows(memory.k, 1 << 24U, [&](std::int64_t key) {
    return key / 128 == 1 ? 1024 * size : key / 128 == 2 ? size / 1024 : size;
  });
  memory.poison_outputs();
  return memory;
}

void expect_scores_of(const Case& problem, double size, Runner run = run_quantized,
                      const cuda::DeviceTraits& device = sectioned_hopper()) {
  SCOPED_TRACE(problem.label + " of " + std::to_string(size));
  CaseMemory memory = memory_of_scores(problem, size);
  expect_out_and_lse(memory.args(), problem, run, device);
}

/// From where arguments of exp2 are exact to the largest floats that products of q and k may be.
TEST(EmulatedQuantized, FiniteScoresOfAnySizeGiveFiniteRows) {
  for (const char* label : {"coded_full_d128", "coded_causal_d128"})
    for (const double size : {20.0, 50.0, 300.0, 1e4, 1e7, 1e15})
      expect_scores_of(case_named(label), size);
  for (const double size : {20.0, 50.0}) expect_scores_of(case_named("coded_full_d64"), size);
}

/// Beside sequences, passes over values, columns that nobody has, values without their mean.
TEST(EmulatedQuantized, FiniteScoresOfAnySizeGiveFiniteRowsBesideAllElse) {
  for (const char* label : {"coded_packed", "coded_infinite", "coded_padded", "smooth_full_d128"})
    expect_scores_of(case_named(label), 1e4);
}

/// Of some rows scores are so large that the kernel behind attention computes them, of those beside them they are not.
void expect_lost_rows(Case problem, double size, Runner run = run_quantized,
                      const cuda::DeviceTraits& device = sectioned_hopper()) {
  SCOPED_TRACE(problem.label);
  CaseMemory memory(problem);
  fill_rows(memory.q, 1 << 20U, [&](std::int64_t row) { return row % 37 == 1 ? size : 1 / size; });
  fill_rows(memory.k, 1 << 24U, [&](std::int64_t) { return size; });
  memory.poison_outputs();
  expect_out_and_lse(memory.args(), problem, run, device);
}

/// Sequences, passes over values, rotations.
TEST(EmulatedQuantized, RowsLostBesideP16AreComputedBehind) {
  for (const char* label : {"quantized_packed", "quantized_infinite", "rotated_causal_d128"})
    expect_lost_rows(case_named(label), 1e4);
}

/// Splits of grouped heads with sinks, sequences, dropout, values without their mean.
TEST(EmulatedSm80Quantized, LostRowsAreComputedBehind) {
  for (const char* label :
       {"summed_few", "rounded_packed", "rounded_infinite", "smooth_rows_full_d64"}) {
    const Case problem = sm80_case_named(label);
    expect_lost_rows(problem, 1e4, run_sm80_quantized, rounding_device(problem.quant));
  }
}

/// References say which rows are lost: of natural scores, of a line.
TEST(EmulatedQuantized, RowsLostBesideProgramsAreComputedBehind) {
  for (const char* label : {"coded_formula", "coded_alibi"})
    expect_lost_rows(case_named(label), 1e5);
}

/// Of sequences whose keys a cache holds as codes, in pages: all rows.
TEST(EmulatedRoundedCaches, LostRowsAreComputedBehind) {
  constexpr float kScale = 1e6F;
  NamedCacheCase each = cache_case_named("hopper_rounded_nan_in_codes");
  each.problem.seqlens = {150, 130};
  each.problem.seqlen_q = 70;
  CacheMemory memory(each.problem);
  AttentionDecode decode = memory.args();
  decode.softmax_scale = kScale;
  const CacheCall call(each.problem, decode);
  if (each.problem.appends()) append_to_cache({.cache = decode.cache, .append = call.append});
  Emulation emulation;
  run_quantized(call.on(each.label, sectioned_hopper()), emulation);
  EXPECT_EQ(emulation.findings, "");
  for (std::int64_t i = 0; i < each.problem.batch(); ++i) {
    AttentionForward dense = memory.dense(i);
    dense.softmax_scale = kScale;
    const reference::ForwardResult expected = reference::attention_forward(dense);
    const Tolerances allowed = tolerances(dense, expected, ComputeDtype::bf16);
    EXPECT_EQ(difference({"out", memory.rows_of(decode.out, i), expected.out, allowed.out}), "");
    EXPECT_EQ(difference({"lse", memory.lse_of(decode.lse, i), expected.lse, allowed.lse}), "");
  }
}

/// A key that is not finite is so to whoever sees it, and to nobody else.
TEST(EmulatedQuantized, LargeScoresStandBesideThoseThatAreNotFinite) {
  Case problem = case_named("coded_causal_d128");
  problem.batch = 2;
  problem.seqlen_kv = 270;
  CaseMemory memory = memory_of_scores(problem, 1e4);
  put_nonfinite(memory);
  expect_out_and_lse(memory.args(), problem, run_quantized, sectioned_hopper());
}

using OfRow = std::function<double(std::int64_t row)>;

/// Rows of these sizes, and their keys.
CaseMemory memory_of_rows(const Case& problem, const OfRow& size_of_q, const OfRow& size_of_k) {
  CaseMemory memory(problem);
  fill_rows(memory.q, 1 << 20U, size_of_q);
  fill_rows(memory.k, 1 << 24U, size_of_k);
  memory.poison_outputs();
  return memory;
}

/// Bits of the rows that are asked for.
std::vector<double> results_of_rows(const Case& problem, CaseMemory memory,
                                    const std::function<bool(std::size_t row)>& is_wanted) {
  const AttentionForward args = memory.args();
  Emulation emulation;
  run_args(run_quantized, problem.label, args, sectioned_hopper(), emulation);
  EXPECT_EQ(emulation.findings, "");
  std::vector<double> rows;
  const std::vector<double> out = values_of(args.out), lse = values_of(args.lse);
  const auto of_row = static_cast<std::size_t>(args.out.size(2) * args.out.size(3));
  const auto num_rows = static_cast<std::size_t>(args.out.size(1));
  for (std::size_t i = 0; i < out.size(); ++i)
    if (is_wanted(i / of_row % num_rows)) rows.push_back(out[i]);
  for (std::size_t i = 0; i < lse.size(); ++i)
    if (is_wanted(i % num_rows)) rows.push_back(lse[i]);
  return rows;
}

TEST(EmulatedQuantized, LargeScoresOfARowDoNotChangeTheRowsBesideIt) {
  const auto bits = [](const Case& problem, double size) {
    const auto of_q = [&](std::int64_t row) { return row % 2 == 0 ? 1 : size; };
    const auto of_k = [](std::int64_t key) { return key < 200 ? 1.0 : 30.0; };
    return results_of_rows(problem, memory_of_rows(problem, of_q, of_k),
                           [](std::size_t row) { return row % 2 == 0; });
  };
  for (const char* label : {"coded_full_d128", "coded_causal_d128"})
    EXPECT_EQ(bits(case_named(label), 1e6), bits(case_named(label), 1)) << label;
}

/// From the third full tile on, scores are eight times as large: rows 8 to 15 of each 16, of which a thread holds one,
/// outgrow their references by up to 150 octaves, some not; rows 0 to 7 do not.
TEST(EmulatedQuantized, ReferencesRiseOfOneOfTheRowsOfAThread) {
  for (const char* label : {"coded_full_d64", "coded_full_d128"}) {
    SCOPED_TRACE(label);
    Case problem = case_named(label);
    problem.seqlen_kv = 700;
    const auto memory = [&](double size) {
      const auto of_q = [=](std::int64_t row) {
        return row % 16 < 8 ? 0.3 : size * static_cast<double>(row % 8 == 7 ? 16 : row % 8);
      };
      return memory_of_rows(problem, of_q, [](std::int64_t key) { return key < 384 ? 8.0 : 1.0; });
    };
    CaseMemory rising = memory(1);
    expect_out_and_lse(rising.args(), problem, run_quantized, sectioned_hopper());
    const auto is_beside = [](std::size_t row) { return row % 16 < 8; };
    EXPECT_EQ(results_of_rows(problem, memory(1), is_beside),
              results_of_rows(problem, memory(0), is_beside));
  }
}

/// What the kernel before attention leaves of an operand, and what the library's own quantisers do.
struct Rounded {
  std::vector<std::int8_t> codes;
  std::vector<float> scales;
};

/// A tensor of codes as the kernel lays them out: heads before rows, `width` codes of each row.
template <typename T>
TensorView codes_of(T* codes, const TensorView& x, std::int64_t width) {
  const std::int64_t rows = x.size(1), heads = x.size(2);
  return view(codes, {x.size(0), rows, heads, x.size(3)},
              {heads * rows * width, width, rows * width, 1});
}

/// Codes of a call, by the kernels before attention of this spec.
class RoundedBefore {
 public:
  RoundedBefore(const cuda::QuantizeKvSpec& spec, const ForwardProblem& f,
                const AttentionForward& args) {
    for (const auto& [name, x] : {std::pair{"q", args.q}, {"k", args.k}, {"v", args.v}}) {
      const TensorBytes bytes = tensor_bytes(name, x);
      emulation_.device.register_buffer(bytes.name, bytes.begin, bytes.size);
    }
    unsigned char* const to = emulation_.device.buffer(
        "codes", std::vector<unsigned char>(cuda::quantized_bytes(spec, f), 0x5A));
    launch = cuda::quantize_kv_launch(spec, f, cuda::call_params(f, args, nullptr), to);
    run_quantizers(launch, emulation_);
    EXPECT_EQ(emulation_.findings, "");
  }

  cuda::QuantizeKvLaunch launch;

 private:
  Emulation emulation_;  // holds the codes
};

cuda::QuantizeKvSpec hopper_spec(const ForwardProblem& f) {
  const auto plan = cuda::choose_forward(f, cuda::typical_device(9, 0));
  return cuda::quantize_kv_spec(plan.spec.as<cuda::Sm90ForwardSpec>());
}

cuda::QuantizeKvSpec sm80_spec(const ForwardProblem& f) {
  const auto plan = cuda::choose_forward(f, cuda::typical_device(8, 0));
  return cuda::quantize_kv_spec(plan.spec.as<cuda::TeamSpec>(), plan.quant);
}

class Codes : public ::testing::TestWithParam<const char*> {
 protected:
  Codes() : memory_(case_of(GetParam())) {
    put_nonfinite(memory_);
    args_ = memory_.args();
    f_ = validate(problem_of(args_), "test");
  }

  static Case case_of(const std::string& label) {
    Case problem = case_named(label);
    problem.batch = 2;
    return problem;
  }

  /// Scales of rows that are not rounded are 0 here, and of no use there.
  [[nodiscard]] Rounded queries_by_cpu(std::int64_t width, const cuda::QuantizedRow* beside) const {
    const TensorView& q = args_.q;
    const std::int64_t groups = num_q_scales(args_.quant, q.size(1));
    Rounded r{std::vector<std::int8_t>(
                  static_cast<std::size_t>(q.size(0) * q.size(1) * q.size(2) * width)),
              std::vector<float>(static_cast<std::size_t>(q.size(0) * q.size(2) * groups))};
    quantize_q({.q = q,
                .codes = codes_of(r.codes.data(), q, width),
                .scales = view(r.scales.data(), {q.size(0), q.size(2), groups}),
                .quant = args_.quant});
    for (std::size_t i = 0; i < r.scales.size(); ++i) {
      if (beside[i].scale == 0) r.scales[i] = 0;
    }
    return r;
  }

  [[nodiscard]] Rounded keys_by_cpu(std::int64_t width) const {
    const TensorView& k = args_.k;
    const std::int64_t groups = num_k_scales(args_.quant, k.size(1));
    Rounded r{std::vector<std::int8_t>(
                  static_cast<std::size_t>(k.size(0) * k.size(1) * k.size(2) * width)),
              std::vector<float>(static_cast<std::size_t>(k.size(0) * k.size(2) * groups))};
    std::vector<float> mean(static_cast<std::size_t>(k.size(0) * k.size(2) * k.size(3)));
    quantize_k({.k = k,
                .codes = codes_of(r.codes.data(), k, width),
                .scales = view(r.scales.data(), {k.size(0), k.size(2), groups}),
                .mean = view(mean.data(), {k.size(0), k.size(2), k.size(3)}),
                .quant = args_.quant});
    return r;
  }

  void expect_keys_of_the_cpu(const cuda::QuantizeKvLaunch& launch) const;

  CaseMemory memory_;
  AttentionForward args_;
  ForwardProblem f_;
};

void Codes::expect_keys_of_the_cpu(const cuda::QuantizeKvLaunch& launch) const {
  const cuda::QuantizeKParams& p = launch.params.k;
  const Rounded k = keys_by_cpu(launch.spec.head_dim_qk);
  EXPECT_TRUE(std::ranges::equal(k.codes, std::span(p.codes, k.codes.size())));
  std::vector<std::pair<std::size_t, std::uint32_t>> unrounded;
  for (std::size_t i = 0; i < k.scales.size(); ++i) {
    const bool is_whole = p.beside.keys[i].unrounded == 0;
    ASSERT_EQ(p.beside.keys[i].scale, is_whole ? k.scales[i] : -k.scales[i]) << i;
    if (!is_whole) unrounded.emplace_back(i, p.beside.keys[i].unrounded);
  }
  // Keys 4 of the first sequence, 150 and 201 of the second, whose first tile is the fourth: group 2, then 3 and 0.
  using Bits = std::pair<std::size_t, std::uint32_t>;
  EXPECT_EQ(unrounded,
            (std::vector<Bits>{
                {2, 1U << 0}, {4 * 4 + 0, 1U << (2 * 9 + 1)}, {4 * 4 + 3, 1U << (2 * 2)}}));
}

TEST_P(Codes, AreThoseOfTheCpu) {
  const RoundedBefore rounded(hopper_spec(f_), f_, args_);
  expect_keys_of_the_cpu(rounded.launch);
}

TEST_P(Codes, OfQueriesTooAreThoseOfTheCpu) {
  const RoundedBefore rounded(sm80_spec(f_), f_, args_);
  expect_keys_of_the_cpu(rounded.launch);
  const cuda::QuantizeQParams& p = rounded.launch.params.q;
  const Rounded q = queries_by_cpu(rounded.launch.spec.head_dim_qk, p.beside.rows);
  EXPECT_TRUE(std::ranges::equal(q.codes, std::span(p.codes, q.codes.size())));
  std::int64_t num_unrounded = 0;
  for (std::size_t i = 0; i < q.scales.size(); ++i) {
    ASSERT_EQ(p.beside.rows[i].scale, q.scales[i]) << i;
    num_unrounded += q.scales[i] == 0 ? 1 : 0;
  }
  EXPECT_EQ(num_unrounded, 2);
}

INSTANTIATE_TEST_SUITE_P(All, Codes,
                         ::testing::Values("quantized_full_d128", "quantized_causal_d64",
                                           "quantized_padded", "rotated_causal_d128",
                                           "rotated_padded"),
                         [](const auto& each) { return std::string(each.param); });

/// Whichever rows and keys share a scale.
TEST(CodesOfGroups, AreThoseOfTheCpu) {
  for (const char* label : {"groups_threads", "groups_narrow_warps", "groups_blocks"}) {
    SCOPED_TRACE(label);
    const Case problem = sm80_case_named(label);
    CaseMemory memory(problem);
    const AttentionForward args = memory.args();
    const ForwardProblem f = validate(problem_of(args), "test");
    const auto plan = cuda::choose_forward(f, rounding_device(problem.quant));
    const RoundedBefore rounded(cuda::quantize_kv_spec(plan.spec.as<cuda::TeamSpec>(), plan.quant),
                                f, args);
    const std::int64_t width = rounded.launch.spec.head_dim_qk;
    const TensorView &q = args.q, &k = args.k;
    const auto codes_like = [&](const TensorView& x) {
      return std::vector<std::int8_t>(
          static_cast<std::size_t>(x.size(0) * x.size(1) * x.size(2) * width));
    };
    std::vector<std::int8_t> q_codes = codes_like(q), k_codes = codes_like(k);
    const std::int64_t groups = num_q_scales(problem.quant, q.size(1));
    std::vector<float> scales(static_cast<std::size_t>(q.size(0) * q.size(2) * groups));
    quantize_q({.q = q,
                .codes = codes_of(q_codes.data(), q, width),
                .scales = view(scales.data(), {q.size(0), q.size(2), groups}),
                .quant = problem.quant});
    const cuda::QuantizeQParams& of_q = rounded.launch.params.q;
    EXPECT_TRUE(std::ranges::equal(q_codes, std::span(of_q.codes, q_codes.size())));
    for (std::int64_t row = 0; row < q.size(0) * q.size(2) * q.size(1); ++row) {
      const std::int64_t group = quant::q_group(problem.quant, row % q.size(1));
      ASSERT_EQ(of_q.beside.rows[row].scale,
                scales[static_cast<std::size_t>(row / q.size(1) * groups + group)])
          << row;
    }
    const std::int64_t key_groups = num_k_scales(problem.quant, k.size(1));
    std::vector<float> key_scales(static_cast<std::size_t>(k.size(0) * k.size(2) * key_groups));
    std::vector<float> mean(static_cast<std::size_t>(k.size(0) * k.size(2) * k.size(3)));
    quantize_k({.k = k,
                .codes = codes_of(k_codes.data(), k, width),
                .scales = view(key_scales.data(), {k.size(0), k.size(2), key_groups}),
                .mean = view(mean.data(), {k.size(0), k.size(2), k.size(3)}),
                .quant = problem.quant});
    const cuda::QuantizeKParams& of_k = rounded.launch.params.k;
    EXPECT_TRUE(std::ranges::equal(k_codes, std::span(of_k.codes, k_codes.size())));
  }
}

/// Of a case with NaN and infinities in v.
class ValueCodes : public ::testing::TestWithParam<const char*> {
 protected:
  ValueCodes() : memory_(case_named(GetParam())) {
    for (const std::int64_t row : {5, 129}) {
      const TensorView v = memory_.v.view();
      memory_.v.set(row * v.stride(1) + v.stride(3), row == 5 ? kInfinity : kNan);
    }
    args_ = memory_.args();
    f_ = validate(problem_of(args_), "test");
  }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

  CaseMemory memory_;
  AttentionForward args_;
  ForwardProblem f_;
};

/// Rows of codes for each channel, keys in the order that they are multiplied in; 0 where there are none.
TEST_P(ValueCodes, AreThoseOfTheCpuTransposed) {
  const RoundedBefore rounded(hopper_spec(f_), f_, args_);
  const cuda::QuantizeVParams& p = rounded.launch.params.v;
  const int head_dim = rounded.launch.spec.head_dim_v;
  const TensorView& v = args_.v;
  const std::int64_t tiles = p.num_tiles, heads = v.size(2), width = v.size(3);
  const std::vector<double> given = values_of(v);  // row-major, as codes of the CPU are
  std::vector<std::uint8_t> codes(given.size());
  std::vector<float> scales(static_cast<std::size_t>(v.size(0) * heads * tiles * width));
  std::vector<float> mean(static_cast<std::size_t>(v.size(0) * heads * width));
  const bool has_mean = args_.quant.smooth_v != Smoothing::none;
  quantize_v({.v = v,
              .codes = view(codes.data(), {v.size(0), v.size(1), heads, width}),
              .scales = view(scales.data(), {v.size(0), heads, tiles, width}),
              .mean = has_mean ? view(mean.data(), {v.size(0), heads, width}) : Float32View{},
              .quant = args_.quant});
  for (std::size_t i = 0; has_mean && i < mean.size(); ++i) {
    const auto channel = static_cast<std::int64_t>(i) % width;
    ASSERT_EQ(p.beside.mean[static_cast<std::int64_t>(i) / width * head_dim + channel], mean[i]);
  }
  std::int64_t num_nan = 0;
  for (std::int64_t list = 0; list < v.size(0) * heads * tiles; ++list) {
    const std::int64_t batch = list / tiles / heads, head = list / tiles % heads;
    ASSERT_EQ(p.beside.scales[list], scales[static_cast<std::size_t>(list * width)]);
    for (int at = 0; at < head_dim * cuda::kQuantizedTile; ++at) {
      const std::int64_t channel = at / cuda::kQuantizedTile;
      const std::int64_t key =
          list % tiles * cuda::kQuantizedTile + cuda::key_of_byte(at % cuda::kQuantizedTile);
      std::uint8_t expected = 0;
      if (channel < width && key < v.size(1)) {
        const auto i =
            static_cast<std::size_t>(((batch * v.size(1) + key) * heads + head) * width + channel);
        expected = std::isfinite(given[i]) ? codes[i] : cuda::kNanCode;
        num_nan += std::isfinite(given[i]) ? 0 : 1;
      }
      ASSERT_EQ(p.codes[list * head_dim * cuda::kQuantizedTile + at], expected)
          << "tile " << list << " channel " << channel << " key " << key;
    }
  }
  EXPECT_EQ(num_nan, 2);
}

INSTANTIATE_TEST_SUITE_P(All, ValueCodes,
                         ::testing::Values("coded_full_d128", "coded_full_d64", "coded_padded",
                                           "smooth_full_d128", "smooth_padded"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace fovea::testing
