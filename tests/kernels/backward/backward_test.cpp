// Kernels of gradients under the emulator, on the feature matrix, against the oracle: what every access may do is
// checked beside.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/shape.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/backward/each_key_walk.hpp"
#include "kernels/backward/emulated_backward.hpp"
#include "kernels/each_landing.hpp"
#include "support/compare.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {
namespace {

using Bits = decltype(bits_of(TensorView()));

class EmulatedBackwards : public ::testing::TestWithParam<GradientCase> {};

/// What programs capture gets the same bits, whoever adds first.
TEST_P(EmulatedBackwards, EqualTheOracle) {
  const GradientCase& problem = GetParam();
  std::vector<std::vector<Bits>> captured;
  int ctas_at_once = 1;
  for_each_landing([&](Emulation& emulation) {
    emulation.ctas_at_once = ctas_at_once++;
    BackwardCompareOptions options;
    options.products = problem.forward.dtype == Dtype::f32 ? ComputeDtype::f32 : ComputeDtype::bf16;
    options.run = [&](const AttentionBackward& args) {
      run_backward(problem.forward.label, args, emulation);
      captured.emplace_back();
      for (const CapturedTensor& each : args.dcaptured)
        captured.back().push_back(bits_of(each.view));
    };
    EXPECT_EQ(backward_difference(problem, options), "");
  });
  for (const auto& each : captured) EXPECT_EQ(each, captured.front());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedBackwards, ::testing::ValuesIn(backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

/// Of a dense tensor.
TensorView last_keys(const TensorView& keys, std::int64_t count) {
  TensorSpec spec = keys.spec();
  const std::int64_t before = (spec.shape[1] - count) * spec.strides[1];
  spec.shape[1] = count;
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(keys.data()));
  return {bytes + before * static_cast<std::int64_t>(size_bytes(spec.dtype)), spec};
}

/// As ranks call it: the lse of a row is large, and of all keys. Rows are not summed again as if a part were all.
TEST(EmulatedBackward, OfSomeOfTheKeysTakesTheLseOfAll) {
  constexpr std::int64_t kSome = 70;
  GradientCase problem = backward_case("large_bias_bf16");
  problem.wants_captured = false;
  // Beyond what is taken as it is, with the digits that P needs.
  const TensorView table = problem.forward.capture(Dtype::f32, {3}, [](std::int64_t i) {
    return i == 0 ? 2000.0 : i == 1 ? -3000.0 : 0.0;
  });
  problem.forward.score = parse_score_mod("q_idx % 3 == 1 ? table[1] : score + table[q_idx % 3]",
                                          {.tensors = {{"table", table}}});
  BackwardCompareOptions options;
  options.products = ComputeDtype::bf16;
  options.run = [&](const AttentionBackward& args) {
    Emulation of_all, of_some;
    run_backward(problem.forward.label, args, of_all);
    std::vector<std::uint16_t> dq(static_cast<std::size_t>(args.dq.spec().num_elements()));
    AttentionBackward some = args;
    some.forward.k = last_keys(args.forward.k, kSome);
    some.forward.v = last_keys(args.forward.v, kSome);
    some.dq = TensorView(dq.data(), make_spec(args.dq.dtype(), shape_of(args.dq)));
    some.dk = last_keys(args.dk, kSome);
    some.dv = last_keys(args.dv, kSome);
    run_backward(problem.forward.label, some, of_some);
    EXPECT_EQ(of_all.findings + of_some.findings, "");
  };
  EXPECT_EQ(backward_difference(problem, options), "");
}

class EmulatedHopperBackwards : public ::testing::TestWithParam<GradientCase> {};

TEST_P(EmulatedHopperBackwards, EqualTheOracle) {
  expect_key_walk_equals_oracle(GetParam(), run_hopper_backward);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedHopperBackwards, ::testing::ValuesIn(hopper_backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

class EmulatedWideBackwards : public ::testing::TestWithParam<GradientCase> {};

/// All gradients have the same bits, whatever lands when.
TEST_P(EmulatedWideBackwards, EqualTheOracle) {
  const GradientCase& problem = GetParam();
  std::vector<std::vector<Bits>> bits;
  for_each_landing([&](Emulation& emulation) {
    BackwardCompareOptions options;
    options.products = ComputeDtype::bf16;
    options.run = [&](const AttentionBackward& args) {
      run_wide_backward(problem.forward.label, args, emulation);
      bits.push_back({bits_of(args.dq), bits_of(args.dk), bits_of(args.dv)});
    };
    EXPECT_EQ(backward_difference(problem, options), "");
  });
  for (const auto& each : bits) EXPECT_EQ(each, bits.front());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedWideBackwards, ::testing::ValuesIn(wide_backward_cases()),
                         [](const auto& each) { return each.param.forward.label; });

class EmulatedOneWalks : public ::testing::TestWithParam<GradientCase> {};

/// CTAs of a head run beside each other, in every order of arrival; by turns dq has the same bits, as dk and dv have in
/// any order.
TEST_P(EmulatedOneWalks, EqualTheOracle) {
  const GradientCase& problem = GetParam();
  std::vector<std::vector<Bits>> bits;
  int ctas_at_once = 1;
  for_each_landing([&](Emulation& emulation) {
    BackwardCompareOptions options;
    options.products = ComputeDtype::bf16;
    options.run = [&](AttentionBackward args) {
      args.forward.is_deterministic = !is_in_any_order(problem);
      run_one_walk(problem.forward.label, args, ctas_at_once++, emulation);
      bits.push_back({bits_of(args.dk), bits_of(args.dv)});
      if (!is_in_any_order(problem)) bits.back().push_back(bits_of(args.dq));
    };
    EXPECT_EQ(backward_difference(problem, options), "");
  });
  for (const auto& each : bits) EXPECT_EQ(each, bits.front());
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedOneWalks, ::testing::ValuesIn(one_walk_cases()),
                         [](const auto& each) { return each.param.forward.label; });

}  // namespace
}  // namespace fovea::testing
