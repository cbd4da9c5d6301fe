// Attention in four bits under the emulator: its records hold the oracle's numbers, its results are the oracle's of the
// same recipe.
#include "cuda/device/shared/fp4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kernels/blackwell/emulated_fp4.hpp"
#include "kernels/blackwell/fp4_cases.hpp"
#include "kernels/each_landing.hpp"
#include "quant/formats.hpp"
#include "reference/attention_forward.hpp"
#include "reference/quantized.hpp"
#include "support/compare.hpp"
#include "support/kernel_compare.hpp"
#include "support/tolerance.hpp"

namespace fovea::testing {
namespace {

Case case_named(const std::string& label) {
  const std::vector<Case> cases = fp4_cases();
  return *std::ranges::find(cases, label, &Case::label);
}

/// By sm120/attention_fp4, or sm100/attention_fp4.
using RunFp4 = void (*)(const std::string& label, const AttentionForward& args,
                        Emulation& emulation);

void expect_equals_oracle(const Case& problem, RunFp4 run, Emulation& emulation) {
  expect_kernel_equals_oracle(
      problem, [&](const AttentionForward& args) { run(problem.label, args, emulation); });
}

class EmulatedFp4s : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedFp4s, EqualTheOracle) {
  Emulation emulation;
  emulation.options = {.seed = 1};
  expect_equals_oracle(GetParam(), run_fp4, emulation);
  EXPECT_EQ(emulation.findings, "");
}

TEST_P(EmulatedFp4s, EqualTheOracleByTensorMemory) {
  Emulation emulation;
  emulation.options = {.seed = 1};
  expect_equals_oracle(GetParam(), run_tensor_memory_fp4, emulation);
  EXPECT_EQ(emulation.findings, "");
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedFp4s, ::testing::ValuesIn(fp4_cases()),
                         [](const auto& each) { return each.param.label; });

TEST(EmulatedFp4s, EqualTheOracleHoweverCopiesLand) {
  for_each_landing([](Emulation& emulation) {
    expect_equals_oracle(case_named("mxfp4_packed_d64"), run_fp4, emulation);
  });
}

/// Products, copies of scales and loads of scores too: of one group of rows, and of two that share the place of scores.
TEST(EmulatedFp4s, EqualTheOracleHoweverProductsLand) {
  for (const char* label : {"mxfp4_packed_d64", "fp4_causal_d128"}) {
    for_each_landing([&](Emulation& emulation) {
      expect_equals_oracle(case_named(label), run_tensor_memory_fp4, emulation);
    });
  }
}

/// Relative, of rows of `width` numbers: those further from the oracle than this.
std::int64_t num_rows_apart(std::span<const double> out, std::span<const double> expected,
                            std::size_t width, double apart) {
  std::int64_t count = 0;
  for (std::size_t row = 0; row < out.size(); row += width) {
    double distance = 0, size = 0;
    for (std::size_t i = row; i < row + width; ++i) {
      distance += (out[i] - expected[i]) * (out[i] - expected[i]);
      size += expected[i] * expected[i];
    }
    if (!(std::sqrt(distance / size) < apart)) ++count;
  }
  return count;
}

/// Tolerances allow the codes of a group to fall on the other side of a rounding, as they may. Here those of one row do
/// at the most, of some 280: where out is f32, all that is left of the distance of the others to the oracle is that of
/// sums of f32.
void expect_codes_of_oracle(RunFp4 run) {
  for (const char* label : {"fp4_by_elements", "mxfp4_softcap_d128"}) {
    CaseMemory memory(case_named(label));
    memory.poison_outputs();
    const AttentionForward args = memory.args();
    const reference::ForwardResult expected = reference::attention_forward(args);
    Emulation emulation;
    run(label, args, emulation);
    const std::vector<double> out = values_of(args.out);
    const auto width = static_cast<std::size_t>(args.out.size(3));
    EXPECT_LE(num_rows_apart(out, expected.out, width, 1e-5), 1) << label;
  }
}

TEST(EmulatedFp4s, HaveTheCodesOfTheOracle) { expect_codes_of_oracle(run_fp4); }

TEST(EmulatedFp4s, HaveTheCodesOfTheOracleByTensorMemory) {
  expect_codes_of_oracle(run_tensor_memory_fp4);
}

void put(GuardedTensor& tensor, std::int64_t row, double value) {
  const TensorView view = tensor.view();
  tensor.set(row * view.stride(1) + 3 * view.stride(3), value);
}

/// Rows with NaN or infinity are not rounded: NaN reaches who sees them, a product of -inf hides a key. All rows see
/// the first keys, some the later ones.
void expect_products_of_given_rows(RunFp4 run) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Case problem = case_named("fp4_causal_d128");
  CaseMemory memory(problem);
  put(memory.k, 4, -kInfinity);
  put(memory.k, 201, kInfinity);
  put(memory.k, 250, std::numeric_limits<double>::quiet_NaN());
  put(memory.q, 17, kInfinity);
  put(memory.q, 130, std::numeric_limits<double>::quiet_NaN());
  memory.poison_outputs();
  const AttentionForward args = memory.args();
  const reference::ForwardResult expected = reference::attention_forward(args);
  Emulation emulation;
  run(problem.label, args, emulation);
  EXPECT_EQ(emulation.findings, "");
  const Tolerances allowed = tolerances(args, expected, ComputeDtype::bf16);
  EXPECT_EQ(difference({"out", args.out, expected.out, allowed.out}), "");
  EXPECT_EQ(difference({"lse", args.lse, expected.lse, allowed.lse}), "");
  const std::vector<double> lse = values_of(args.lse);
  const auto num_nan = std::ranges::count_if(lse, [](double x) { return std::isnan(x); });
  EXPECT_GT(num_nan, 0);
  EXPECT_LT(num_nan, std::ssize(lse));
}

TEST(EmulatedFp4s, MultiplyRowsThatAreNotFiniteAsGiven) { expect_products_of_given_rows(run_fp4); }

TEST(EmulatedFp4s, MultiplyRowsThatAreNotFiniteAsGivenByTensorMemory) {
  expect_products_of_given_rows(run_tensor_memory_fp4);
}

// ---- records ----

/// A dense call's, whose numbers are read back.
class Records {
 public:
  using Run = cuda::Fp4RoundingLaunch (*)(const std::string& label, const AttentionForward& args,
                                          Emulation& emulation);

  Records(const AttentionForward& args, const std::string& label, Run run) {
    rounding_ = run(label, args, emulation_);
    EXPECT_EQ(emulation_.findings, "");
  }

  const cuda::Fp4RoundingParams& params() const { return rounding_.params; }
  const cuda::Fp4RoundingSpec& spec() const { return rounding_.spec; }

  /// What the code of a channel of a row of Q stands for, with the mean of its block.
  double query(std::int64_t batch, std::int64_t head, std::int64_t row, std::int64_t d) const {
    const std::int64_t tile = tile_of(params().q, batch, head, row);
    const int width = spec().head_dim_qk, in_tile = static_cast<int>(row % cuda::kQuantizedTile);
    const char* record = params().results.queries + tile * cuda::fp4_query_record_bytes(width);
    if (spec().is_for_tensor_memory) {
      return transposable(record, in_tile, static_cast<int>(d), width, width) +
             static_cast<double>(params().block_means[tile * width + d]);
    }
    const int at = in_tile * (width / 2) + static_cast<int>(d / 2);
    const int word = in_tile * (width / cuda::kFp4Depth) + static_cast<int>(d) / cuda::kFp4Depth;
    return number(record, at, d % 2, word, width, static_cast<int>(d % cuda::kFp4Depth)) +
           static_cast<double>(params().block_means[tile * width + d]);
  }
  double key(std::int64_t batch, std::int64_t head, std::int64_t row, std::int64_t d) const {
    const std::int64_t tile = tile_of(params().k, batch, head, row);
    const int width = spec().head_dim_qk;
    const int in_tile = cuda::fp4_row_of_key(static_cast<int>(row % cuda::kQuantizedTile),
                                             spec().is_for_tensor_memory);
    const char* record = params().results.keys + tile * cuda::fp4_record_bytes(width);
    const std::int64_t mean = (batch * params().k.num_heads_kv + head) * width + d;
    return transposable(record, in_tile, static_cast<int>(d), width, width) +
           static_cast<double>(params().key_means[mean]);
  }
  double value(std::int64_t batch, std::int64_t head, std::int64_t row, std::int64_t d) const {
    const std::int64_t tile = tile_of(params().v, batch, head, row);
    const int width = spec().head_dim_v;
    const char* record = params().results.values + tile * cuda::fp4_record_bytes(width);
    return transposable(record, static_cast<int>(d), static_cast<int>(row % cuda::kQuantizedTile),
                        cuda::kQuantizedTile, width);
  }

 private:
  static std::int64_t tile_of(const cuda::RowsToRound& x, std::int64_t batch, std::int64_t head,
                              std::int64_t row) {
    return (batch * x.num_heads_kv + head) * x.num_tiles + row / cuda::kQuantizedTile;
  }

  /// Column `k` of a row of `depth` numbers whose 16-byte chunks are permuted as tile/shared_tile.cuh says.
  double transposable(const char* record, int row, int k, int depth, int width) const {
    const int chunks = depth / 32, pitch = depth / 2;
    const int chunk = (k / 32) ^ (row * pitch / 128 % chunks);
    const int at = row * pitch + chunk * 16 + k % 32 / 2;
    const int step = k / cuda::kFp4Depth, steps = depth / cuda::kFp4Depth;
    const int rows = cuda::kQuantizedTile * width / depth;
    const int word = spec().is_for_tensor_memory ? cuda::fp4_copied_scale_word(row, step, rows)
                                                 : cuda::fp4_scale_word(row, step, steps);
    return number(record, at, k % 2, word, width, k % cuda::kFp4Depth);
  }

  /// `k`: within the step whose scales are word `word`.
  double number(const char* record, int byte, std::int64_t nibble, int word, int width,
                int k) const {
    const auto code = static_cast<std::uint8_t>(record[byte]) >> (4 * nibble) & 15;
    const int group = spec().group;
    const auto bits =
        static_cast<std::uint8_t>(record[cuda::fp4_codes_bytes(width) + 4 * word + k / group]);
    const float scale = group == 16 ? quant::e4m3_value(bits) : quant::ue8m0_value(bits);
    return static_cast<double>(quant::e2m1_value(static_cast<std::uint8_t>(code))) *
           static_cast<double>(scale);
  }

  Emulation emulation_;
  cuda::Fp4RoundingLaunch rounding_;
};

class Fp4Records : public ::testing::TestWithParam<const char*> {};

/// Bit by bit: codes and scales have no tolerance.
void expect_numbers_of_oracle(const char* label, Records::Run run) {
  CaseMemory memory(case_named(label));
  const AttentionForward args = memory.args();
  const reference::RoundedOperands expected = reference::rounded_operands(args);
  const Records records(args, label, run);
  const auto expect_equal = [&](const TensorView& t, const reference::HeadRows& rows, auto number) {
    for (std::int64_t batch = 0; batch < t.size(0); ++batch)
      for (std::int64_t row = 0; row < t.size(1); ++row)
        for (std::int64_t head = 0; head < t.size(2); ++head) {
          const auto numbers = rows[{batch, row, head}];
          for (std::int64_t d = 0; d < t.size(3); ++d)
            ASSERT_EQ((records.*number)(batch, head, row, d), numbers[static_cast<std::size_t>(d)])
                << "batch " << batch << " head " << head << " row " << row << " channel " << d;
        }
  };
  expect_equal(args.q, expected.q, &Records::query);
  expect_equal(args.k, expected.k, &Records::key);
  expect_equal(args.v, expected.v, &Records::value);
}

TEST_P(Fp4Records, HoldTheNumbersOfTheOracle) {
  expect_numbers_of_oracle(GetParam(), run_fp4_rounding);
}

TEST_P(Fp4Records, HoldTheNumbersOfTheOracleForTensorMemory) {
  expect_numbers_of_oracle(GetParam(), run_tensor_memory_fp4_rounding);
}

INSTANTIATE_TEST_SUITE_P(All, Fp4Records,
                         ::testing::Values("fp4_full_d128_wide", "fp4_full_d64",
                                           "mxfp4_softcap_d128", "fp4_by_elements"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace fovea::testing
