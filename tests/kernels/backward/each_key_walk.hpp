// A kernel whose CTAs own keys and take turns at dq, under each way in which copies and products may land.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "kernels/backward/backward_cases.hpp"
#include "kernels/each_landing.hpp"
#include "support/compare.hpp"
#include "support/gradient_compare.hpp"

namespace fovea::testing {

/// CTAs of a head run beside each other, in every order of arrival; dq then has the same bits, and what programs
/// capture in any order. run(label, args, ctas_at_once, emulation).
template <class Run>
void expect_key_walk_equals_oracle(const GradientCase& problem, const Run& run) {
  std::vector<std::vector<decltype(bits_of(TensorView()))>> bits;
  int ctas_at_once = 1;
  for_each_landing([&](Emulation& emulation) {
    BackwardCompareOptions options;
    options.products = ComputeDtype::bf16;
    options.run = [&](AttentionBackward args) {
      args.forward.is_deterministic = !is_in_any_order(problem);
      run(problem.forward.label, args, ctas_at_once++, emulation);
      bits.emplace_back();
      if (!is_in_any_order(problem)) bits.back().push_back(bits_of(args.dq));
      for (const CapturedTensor& each : args.dcaptured) bits.back().push_back(bits_of(each.view));
    };
    EXPECT_EQ(backward_difference(problem, options), "");
  });
  for (const auto& each : bits) EXPECT_EQ(each, bits.front());
}

}  // namespace fovea::testing
