// The oracle's gradients, and gradients of gradients, against those that PyTorch's float64 autograd
// gave (scripts/capture_torch_gradients.py).
#include "torch_gradients.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string_view>
#include <vector>

#include "fovea/backward.hpp"

#include "reference/attention_backward.hpp"

namespace fovea::reference {
namespace {

/// Captured values have ten digits.
void expect_near(const std::vector<double>& got, std::span<const double> expected,
                 std::string_view name) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], expected[i], 1e-9 * (1 + std::fabs(expected[i]))) << name << " " << i;
}

Captures captures_of(const TorchProblem& problem) {
  Captures captures;
  for (const TorchCapture& each : problem.captured) {
    if (each.shape.empty()) {
      captures.scalars.push_back(CapturedScalar::of(each.name, each.values[0]));
    } else {
      const TensorSpec spec = make_spec(Dtype::f32, each.shape);
      captures.tensors.push_back({each.name, TensorView(each.values.data(), spec)});
    }
  }
  return captures;
}

AttentionDoubleBackward args_of(const TorchProblem& p) {
  const auto queries = [&](std::span<const float> values, std::int64_t dim) {
    return view(values.data(), {kTorchBatch, p.seqlen_q, p.num_heads_q, dim});
  };
  const auto keys = [&](std::span<const float> values, std::int64_t dim) {
    return view(values.data(), {kTorchBatch, p.seqlen_kv, p.num_heads_kv, dim});
  };
  AttentionDoubleBackward args;
  AttentionForward& forward = args.backward.forward;
  forward.q = queries(p.q, kTorchHeadDimQk);
  forward.k = keys(p.k, kTorchHeadDimQk);
  forward.v = keys(p.v, kTorchHeadDimV);
  forward.softmax_scale = p.softmax_scale;
  if (!p.sinks.empty()) forward.sinks = view(p.sinks.data(), {p.num_heads_q});
  forward.score = parse_score_mod(p.score, captures_of(p));
  forward.mask = parse_mask_mod(p.mask);
  args.backward.dout = queries(p.dout, kTorchHeadDimV);
  args.backward.dlse = view(p.dlse.data(), {kTorchBatch, p.num_heads_q, p.seqlen_q});
  args.ddq = queries(p.ddq, kTorchHeadDimQk);
  args.ddk = keys(p.ddk, kTorchHeadDimQk);
  args.ddv = keys(p.ddv, kTorchHeadDimV);
  return args;
}

TEST(TorchGradients, AreThoseOfTheOracle) {
  for (const TorchProblem& problem : torch_data::torch_problems()) {
    SCOPED_TRACE(problem.name);
    const BackwardResult got = reference::attention_backward(args_of(problem).backward);
    expect_near(got.dq, problem.expected_dq, "dq");
    expect_near(got.dk, problem.expected_dk, "dk");
    expect_near(got.dv, problem.expected_dv, "dv");
    expect_near(got.dsinks, problem.expected_dsinks, "dsinks");
    ASSERT_EQ(got.dcaptured.size(), problem.captured.size());
    for (const TorchCapture& each : problem.captured)
      expect_near(got.dcaptured.at(each.name), each.expected, each.name);
  }
}

TEST(TorchGradients, OfGradientsAreThoseOfTheOracle) {
  for (const TorchProblem& problem : torch_data::torch_problems()) {
    SCOPED_TRACE(problem.name);
    const DoubleBackwardResult got = reference::attention_double_backward(args_of(problem));
    expect_near(got.grad_q, problem.expected_grad_q, "grad_q");
    expect_near(got.grad_k, problem.expected_grad_k, "grad_k");
    expect_near(got.grad_v, problem.expected_grad_v, "grad_v");
    expect_near(got.grad_dout, problem.expected_grad_dout, "grad_dout");
    expect_near(got.grad_dlse, problem.expected_grad_dlse, "grad_dlse");
  }
}

}  // namespace
}  // namespace fovea::reference
