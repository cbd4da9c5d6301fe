// Gradients by a recipe under the emulator: operands are the oracle's rounded ones, as elements; gradients at them are
// the oracle's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/scalar_io.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/backward/emulated_backward.hpp"
#include "kernels/backward/emulated_rounding.hpp"
#include "problem/backward.hpp"
#include "reference/plain_formula.hpp"
#include "reference/quantized.hpp"
#include "support/compare.hpp"
#include "support/features.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

/// The call at rounded operands, which lie in memory of garbage.
class RoundedBefore {
 public:
  explicit RoundedBefore(const AttentionBackward& args, int major = 8) {
    const GradientProblem problem = validate(problem_of(args), "test");
    plan = cuda::choose_backward(problem, cuda::typical_device(major, 0));
    if (plan.rounded == nullptr) throw std::logic_error("operands are not rounded");
    constexpr std::byte kGarbage{0xFF};  // NaN
    memory_.assign(plan.workspace_bytes + kAlignment, kGarbage);
    void* first = memory_.data();
    std::size_t bytes = memory_.size();
    auto* const workspace =
        static_cast<std::byte*>(std::align(kAlignment, plan.workspace_bytes, first, bytes));
    call = cuda::rounded_call(problem, plan, args, workspace);
    Emulation emulation;
    run_rounding(call, args.forward, workspace + plan.rounded->numbers_at,
                 plan.rounded->out_at - plan.rounded->numbers_at, emulation);
    EXPECT_EQ(emulation.findings, "");
  }

  cuda::BackwardPlan plan;
  cuda::RoundedCall call{};

 private:
  static constexpr std::size_t kAlignment = 256;
  std::vector<std::byte> memory_;
};

/// What turning a row back in f32 may cost one of its numbers: each is a sum of all.
double error_of_rotation(std::span<const double> row) {
  double greatest = 0;
  for (const double x : row)
    if (std::isfinite(x)) greatest = std::max(greatest, std::fabs(x));
  return 0x1p-20 * greatest;
}

/// Of one operand; rows behind the last sequence are nobody's.
void expect_rounded(const char* name, const TensorView& got, const reference::HeadRows& expected,
                    std::int64_t num_rows, bool is_rotated = false) {
  const std::vector<double> values = values_of(got);
  const std::vector<double>& oracle = expected.values();
  ASSERT_EQ(values.size(), oracle.size());
  const auto width = static_cast<std::size_t>(got.size(got.rank() - 1));
  const std::size_t of_row =
      static_cast<std::size_t>(got.size(got.rank() - 2) * got.size(got.rank() - 1));
  const std::size_t count =
      got.rank() == 3 ? static_cast<std::size_t>(num_rows) * of_row : oracle.size();
  constexpr double kTwice = 1 + 0x1p-10;  // rounded to f32 before
  const double most = got.dtype() == Dtype::f16 ? 65504 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    const double exact = oracle[i];
    if (values[i] == exact || (std::isnan(exact) && std::isnan(values[i]))) continue;
    const double element = std::clamp(exact, -most, most);
    const double turned =
        is_rotated ? error_of_rotation(std::span(oracle).subspan(i - i % width, width)) : 0;
    ASSERT_LE(std::fabs(values[i] - element),
              kTwice * reference::rounding(got.dtype(), element) + turned)
        << name << " " << i << " is " << values[i] << ", expected " << element;
  }
}

void expect_rounded_operands(const AttentionBackward& args, const RoundedBefore& rounded) {
  const reference::RoundedOperands expected = reference::rounded_operands(args.forward);
  const auto last = [](const TensorView& cu_seqlens) {
    return cu_seqlens ? cu_seqlen(cu_seqlens, cu_seqlens.size(0) - 1) : 0;
  };
  const AttentionForward& got = rounded.call.args.forward;
  const bool is_rotated = args.forward.quant.hadamard;
  expect_rounded("q", got.q, expected.q, last(args.forward.cu_seqlens_q), is_rotated);
  expect_rounded("k", got.k, expected.k, last(args.forward.cu_seqlens_kv), is_rotated);
  expect_rounded("v", got.v, expected.v, last(args.forward.cu_seqlens_kv));
}

// ---- operands ----

struct Rounding {
  const char* label;
  const char* quant;
  Dtype dtype = Dtype::bf16;
  std::int64_t head_dim = 64, head_dim_v = 64;
  Layout layout = Layout::bshd;
  bool is_packed = false;
};

void PrintTo(const Rounding& rounding, std::ostream* out) { *out << rounding.label; }

GradientCase case_of(const Rounding& each) {
  GradientCase problem{.forward = plain_case(each.dtype)};
  Case& c = problem.forward;
  c.batch = 2;
  c.seqlen_q = 150;  // a tile and a cut one
  c.seqlen_kv = 270;
  c.num_heads_q = 4;
  c.num_heads_kv = 2;
  c.head_dim_qk = each.head_dim;
  c.head_dim_v = each.head_dim_v;
  c.layout = each.layout;
  if (each.is_packed) c.sequences = {{5, 0}, {3, 7}, {129, 128}, {64, 127}};
  if (each.is_packed) c.trailing_rows = 3;
  c.quant = parse_quantization(each.quant);
  return problem;
}

/// The greatest f16 of both signs in keys 24 and 32, which share a scale, and a mean of 120 by key 16, which is in the
/// sample: in front of the mean the positive one has not the greatest magnitude, and its code is rounded up.
void put_greatest(GuardedTensor& k) {
  const TensorView view = k.view();
  const std::int64_t row = view.stride(view.rank() - 3), col = view.stride(view.rank() - 1);
  k.set(16 * row + col, 120 * 64);
  k.set(24 * row + col, -65504);
  k.set(32 * row + col, 65504);
}

class Roundings : public ::testing::TestWithParam<Rounding> {};

/// Rows of q and k that hold what is not finite stay as they are, and such elements of v.
TEST_P(Roundings, AreTheOraclesAsElements) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  GradientMemory memory(case_of(GetParam()));
  for (GuardedTensor* tensor : {&memory.forward.q, &memory.forward.k, &memory.forward.v}) {
    const TensorView view = tensor->view();
    const std::int64_t row = view.stride(view.rank() - 3), col = view.stride(view.rank() - 1);
    tensor->set(4 * row + 3 * col, -kInfinity);
    tensor->set(130 * row + 9 * col, kNan);
  }
  // Rotated, numbers of that size are in all others' sums.
  if (!memory.args().forward.quant.hadamard) put_greatest(memory.forward.k);
  const AttentionBackward args = memory.args();
  expect_rounded_operands(args, RoundedBefore(args));
}

INSTANTIATE_TEST_SUITE_P(
    All, Roundings,
    ::testing::Values(
        Rounding{"accurate_d64", "accurate"},
        Rounding{.label = "accurate_odd",
                 .quant = "accurate",
                 .dtype = Dtype::f16,
                 .head_dim = 33,
                 .head_dim_v = 40,
                 .layout = Layout::strided_dim},
        Rounding{.label = "accurate_packed", .quant = "accurate", .is_packed = true},
        Rounding{.label = "fast_packed", .quant = "fast", .head_dim_v = 40, .is_packed = true},
        Rounding{.label = "fast_odd",
                 .quant = "fast",
                 .dtype = Dtype::f16,
                 .head_dim_v = 33,
                 .layout = Layout::odd_offset},
        Rounding{.label = "fast_d128", .quant = "fast", .head_dim = 128, .head_dim_v = 128},
        Rounding{.label = "rotated_d128", .quant = "accurate,hadamard=yes", .head_dim = 128},
        Rounding{.label = "rotated_odd",
                 .quant = "accurate,hadamard=yes",
                 .dtype = Dtype::f16,
                 .head_dim = 40,
                 .layout = Layout::odd_offset},
        Rounding{.label = "rotated_smooth_packed",
                 .quant = "fast,smooth_v=sequence,hadamard=yes",
                 .head_dim_v = 40,
                 .is_packed = true}),
    [](const auto& each) { return std::string(each.param.label); });

// ---- gradients ----

struct OfRecipe {
  const char* label;  // of backward_cases()
  const char* quant;
};

void PrintTo(const OfRecipe& each, std::ostream* out) { *out << each.label << " " << each.quant; }

GradientCase case_of(const OfRecipe& each) {
  const std::vector<GradientCase> cases = backward_cases();
  GradientCase problem = *std::ranges::find(
      cases, each.label, [](const GradientCase& one) { return one.forward.label; });
  problem.forward.quant = parse_quantization(each.quant);
  return problem;
}

/// As forward's kernels leave them, which have tests of their own.
void write_forward(AttentionForward& call) {
  const reference::PlainResult plain = reference::plain_formula(call, ComputeDtype::f32);
  const auto write = [](const TensorView& to, const std::vector<double>& values) {
    auto* const bytes = static_cast<std::byte*>(to.mutable_data());  // dense
    for (std::size_t i = 0; i < values.size(); ++i)
      store_scalar(bytes, to.dtype(), static_cast<std::int64_t>(i), static_cast<float>(values[i]));
  };
  write(call.out, plain.out);
  write(call.lse, plain.lse);
}

class EmulatedRoundedBackwards : public ::testing::TestWithParam<OfRecipe> {};

TEST_P(EmulatedRoundedBackwards, EqualTheOracle) {
  const GradientCase problem = case_of(GetParam());
  Emulation emulation;
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = [&](const AttentionBackward& args) {
    RoundedBefore rounded(args);
    expect_rounded_operands(args, rounded);
    write_forward(rounded.call.args.forward);
    run_backward(problem.forward.label, rounded.call.args, emulation);
  };
  EXPECT_EQ(backward_difference(problem, options), "");
  EXPECT_EQ(emulation.findings, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, EmulatedRoundedBackwards,
    ::testing::Values(
        OfRecipe{"grouped_f16_d64", "accurate"}, OfRecipe{"grouped_f16_d64", "fast"},
        OfRecipe{"grouped_f16_d64", "fast,smooth_v=sequence,hadamard=yes"},
        OfRecipe{"programs_bf16_d64", "accurate"}, OfRecipe{"dropped_bf16_d128", "fast"},
        OfRecipe{"packed_edges_bf16", "accurate"}, OfRecipe{"packed_edges_bf16", "fast"},
        OfRecipe{"nan_rows_bf16_d64", "accurate"}, OfRecipe{"captured_packed_bf16", "accurate"}),
    [](const auto& each) {
      std::string name = std::string(each.param.label) + "_" + each.param.quant;
      std::ranges::replace_if(
          name, [](char c) { return c == ',' || c == '='; }, '_');
      return name;
    });

}  // namespace
}  // namespace fovea::testing
