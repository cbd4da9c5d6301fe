// Numbers below the normal range: f32 products keep them, the processor's bf16 products count them as 0
// (docs/design/contract.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "reference/attention_forward.hpp"
#include "support/compare.hpp"

namespace fovea::testing {
namespace {

constexpr double kLeastNormal = 0x1p-126;  // of f32 and bf16

/// More rows than those that are multiplied in f32 on every target.
Case panel(Dtype dtype) {
  return {.label = "denormal",
          .seqlen_q = 40,
          .seqlen_kv = 300,
          .num_heads_q = 2,
          .dtype = dtype,
          .out_dtype = Dtype::f32};
}

void scale(GuardedTensor& tensor, double factor) {
  const std::vector<double> values = values_of(tensor.view());
  for (std::size_t i = 0; i < values.size(); ++i)
    tensor.set(static_cast<std::int64_t>(i), values[i] * factor);
  tensor.seal();
}

double largest_of(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

double largest_error(const AttentionForward& args, const std::vector<double>& expected) {
  attention_forward(args);
  const std::vector<double> out = values_of(args.out);
  double largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    largest = std::max(largest, std::fabs(out[i] - expected[i]));
  return largest;
}

bool multiplies_bf16(CpuTarget target, Dtype dtype) {
  return compute_dtype_on(target, dtype, ComputeDtype::automatic) == ComputeDtype::bf16;
}

/// Of values around 2^-128, which are denormal, and 2^-122, whose products with probabilities are.
TEST(CpuDenormals, InValuesErrByTheirNumberTimesTheLeastNormalNumber) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const double magnitude : {0x1p-128, 0x1p-122}) {
      for (const CpuTarget target : targets_for(dtype)) {
        SCOPED_TRACE(std::string(name(target)) + ", " + std::string(name(dtype)));
        CaseMemory memory(panel(dtype));
        scale(memory.v, magnitude);
        const AttentionForward args = memory.args(target);
        const std::vector<double> expected = reference::attention_forward(args).out;
        const double error = largest_error(args, expected);
        constexpr double kKeys = 300;
        // Probabilities of 8 bits, sums of 24; in f32, denormal products are rounded to multiples of 2^-149.
        const double values = largest_of(values_of(args.v));
        if (multiplies_bf16(target, dtype)) {
          EXPECT_LE(error, 2 * kKeys * kLeastNormal + values * 0x1p-8);
        } else {
          EXPECT_LE(error, values * kKeys * 0x1p-24 + kKeys * 0x1p-149);
        }
      }
    }
  }
}

/// Products of about 1: queries that are denormal lose them where they count as 0.
TEST(CpuDenormals, InQueriesCountAsZeroInBf16ProductsAlone) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const CpuTarget target : targets_for(dtype)) {
      SCOPED_TRACE(std::string(name(target)) + ", " + std::string(name(dtype)));
      CaseMemory memory(panel(dtype));
      scale(memory.q, 0x1p-130);
      scale(memory.k, 0x1p124);
      AttentionForward args = memory.args(target);
      args.softmax_scale = 0x1p6F;
      AttentionForward as_multiplied = args;
      if (multiplies_bf16(target, dtype)) as_multiplied.softmax_scale = 0;
      const std::vector<double> expected = reference::attention_forward(as_multiplied).out;
      EXPECT_LE(largest_error(args, expected), dtype == Dtype::f32 ? 1e-5 : 0x1p-6);
      EXPECT_GT(largest_of(expected), 0.1);
    }
  }
}

}  // namespace
}  // namespace fovea::testing
