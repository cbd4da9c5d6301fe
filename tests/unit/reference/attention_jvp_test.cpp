#include "reference/attention_jvp.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fovea/mask.hpp"

#include "reference/attention_backward.hpp"
#include "reference/element.hpp"
#include "support/features.hpp"
#include "support/gradient_case.hpp"

namespace fovea::reference {
namespace {

using testing::Case;
using testing::Feature;
using testing::GradientMemory;
using testing::NamedTensor;

/// Poison meets exact zeros only: it is of rows that see nothing.
double inner(const std::vector<double>& a, const TensorView& b) {
  const std::vector<double> other = elements(b);
  EXPECT_EQ(a.size(), other.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != 0) sum += a[i] * other[i];
  }
  return sum;
}

/// <dout, out'> + <dlse, lse'> = <gradients, tangents>, to fp64's accuracy.
void expect_duality(const Case& problem) {
  SCOPED_TRACE(problem.describe());
  GradientMemory memory({.forward = problem});
  const JvpResult forward_mode = reference::attention_jvp(memory.jvp_args());
  const BackwardResult reverse = reference::attention_backward(memory.args());
  const double outputs = inner(forward_mode.out_tangent, memory.dout.view()) +
                         inner(forward_mode.lse_tangent, memory.dlse.view());
  double inputs = inner(reverse.dq, memory.q_tangent.view()) +
                  inner(reverse.dk, memory.k_tangent.view()) +
                  inner(reverse.dv, memory.v_tangent.view());
  if (problem.has_sinks) inputs += inner(reverse.dsinks, memory.sinks_tangent.view());
  ASSERT_EQ(reverse.dcaptured.size(), memory.captured_tangents.size());
  for (const NamedTensor& each : memory.captured_tangents) {
    inputs += inner(reverse.dcaptured.at(each.name), each.tensor.view());
  }
  EXPECT_NEAR(outputs, inputs, 1e-11 * (1 + std::fabs(outputs)));
}

TEST(ReferenceJvp, IsDualToBackwardForEveryFeatureAndDtype) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const Feature& feature : testing::features()) {
      Case problem = testing::plain_case(dtype);
      problem.has_sinks = true;
      problem.distribution = testing::Distribution::normal;
      feature.add(problem);
      expect_duality(problem);
    }
  }
}

TEST(ReferenceJvp, ForwardResultsAreThoseOfForward) {
  Case problem = testing::plain_case(Dtype::f32);
  problem.mask = causal();
  GradientMemory memory({.forward = problem});
  const JvpResult got = reference::attention_jvp(memory.jvp_args());
  const ForwardResult expected = reference::attention_forward(memory.forward.args());
  EXPECT_EQ(got.forward.out, expected.out);
  EXPECT_EQ(got.forward.lse, expected.lse);
}

/// Scores 0 and log 3, so probabilities are 1/4 and 3/4.
TEST(ReferenceJvp, TwoKeysAreWorkedOutOnPaper) {
  const float q = 1, k[] = {0, std::log(3.F)}, v[] = {4, 8}, k_tangent[] = {2, 0};
  AttentionJvp args;
  args.forward.q = view(&q, {1, 1, 1, 1});
  args.forward.k = view(k, {1, 2, 1, 1});
  args.forward.v = view(v, {1, 2, 1, 1});
  args.forward.softmax_scale = 1;
  args.k_tangent = view(k_tangent, {1, 2, 1, 1});
  const JvpResult got = reference::attention_jvp(args);
  EXPECT_NEAR(got.lse_tangent[0], 0.5, 1e-7);
  EXPECT_NEAR(got.out_tangent[0], 0.25 * 1.5 * 4 + 0.75 * -0.5 * 8, 1e-7);
  args.v_tangent = view(v, {1, 2, 1, 1});
  args.k_tangent = {};
  EXPECT_NEAR(reference::attention_jvp(args).out_tangent[0], 7, 1e-7);
}

TEST(ReferenceJvp, EmptyRowHasTangentsOfZeroWhateverItsTangents) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionJvp args;
  args.forward.q = args.q_tangent = view(&nan, {1, 1, 1, 1});
  args.forward.k = args.k_tangent = view(&nan, {1, 1, 1, 1});
  args.forward.v = args.v_tangent = view(&nan, {1, 1, 1, 1});
  args.forward.mask = mask_mod([](auto x) { return x.kv_idx < 0; });
  const JvpResult got = reference::attention_jvp(args);
  EXPECT_EQ(got.out_tangent[0], 0);
  EXPECT_EQ(got.lse_tangent[0], 0);
}

}  // namespace
}  // namespace fovea::reference
