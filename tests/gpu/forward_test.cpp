// Attention forward on a GPU against the oracle: the feature matrix, tile edges, both 16-bit dtypes and f32. Without a driver or a
// device everything is skipped.
#include "problem/forward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"
#include "gpu/device_copy.hpp"
#include "support/case.hpp"
#include "support/features.hpp"
#include "support/kernel_compare.hpp"

namespace fovea::testing {
namespace {

/// The kernels of sm_80, which newer devices run too: chosen as for an older device of the same size.
cuda::ForwardPlan plan_sm80(const ForwardProblem& problem) {
  const cuda::driver::DeviceContext& context = cuda::driver::process_context(0);
  const cuda::driver::DeviceInfo& info = context.info();
  cuda::ForwardPlan plan =
      cuda::choose_forward(problem, {.major = 8,
                                     .minor = 0,
                                     .num_sms = info.num_sms,
                                     .shared_bytes_per_cta = info.shared_bytes_per_cta,
                                     .shared_bytes_per_sm = info.shared_bytes_per_sm,
                                     .l2_bytes = info.l2_bytes});
  cuda::load_kernels(cuda::jit::process_loader(), context, plan);
  return plan;
}

void run_on_gpu(const AttentionForward& args) {
  const ForwardProblem problem = validate(problem_of(args), "test");
  const cuda::ForwardPlan plan = plan_sm80(problem);
  DeviceCopies copies;
  copies.add(tensors_of_call(args));
  DeviceMemory workspace(cuda::driver::process_context(0), plan.workspace_bytes + 1);
  workspace.fill(0xFF, Stream(nullptr));
  cuda::ForwardLaunch call = cuda::forward_launch(problem, plan, args, workspace.data(), nullptr);
  move_tensors(call, [&](const void* host) { return copies.address(host); });
  cuda::place_range_tables(plan, workspace.data(), call);
  cuda::launch_forward(plan, call, nullptr);
  copies.copy_back();
}

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto& driver = cuda::driver::process_driver();
    if (!driver.is_present()) GTEST_SKIP() << driver.why_absent();
    if (driver.devices().empty()) GTEST_SKIP() << "no device";
  }
};

void expect_right(const Case& problem) { expect_kernel_equals_oracle(problem, run_on_gpu); }

class GpuFeatures : public Gpu, public ::testing::WithParamInterface<Feature> {};

TEST_P(GpuFeatures, EqualTheOracle) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
    Case problem = plain_case(dtype);
    problem.label = GetParam().name;
    GetParam().add(problem);
    if (GetParam().group == "products") continue;  // of CPUs
    expect_right(problem);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFeatures,
                         ::testing::ValuesIn(features().begin(), features().end()),
                         [](const auto& each) { return std::string(each.param.name); });

TEST_F(Gpu, TileEdges) {
  for (const std::int64_t head_dim : {32, 64, 128, 256}) {
    for (const std::int64_t seqlen_q : {1, 63, 64, 65, 127, 128, 129, 257}) {
      for (const std::int64_t seqlen_kv : {1, 63, 64, 65, 128, 200, 515}) {
        Case problem = plain_case(Dtype::bf16);
        problem.label = "edges";
        problem.batch = 1;
        problem.seqlen_q = seqlen_q;
        problem.seqlen_kv = seqlen_kv;
        problem.head_dim_qk = problem.head_dim_v = head_dim;
        if (seqlen_q % 2 == 1) problem.mask = causal();
        problem.wants_row_max = seqlen_q % 4 == 1;
        expect_right(problem);
      }
    }
  }
}

TEST_F(Gpu, HeadDims) {
  for (const std::int64_t qk : {1, 8, 40, 72, 96, 160, 192, 256}) {
    for (const std::int64_t v : {8, 33, 64, 128, 256}) {
      Case problem = plain_case(Dtype::f16);
      problem.label = "head_dims";
      problem.seqlen_q = 130;
      problem.head_dim_qk = qk;
      problem.head_dim_v = v;
      problem.mask = causal();
      expect_right(problem);
    }
  }
}

TEST_F(Gpu, SplitsOfManyKeys) {
  for (const std::int64_t keys : {257, 1000, 2048, 17000, 40001}) {
    for (const std::int64_t group : {1, 7, 8}) {
      Case problem = plain_case(Dtype::bf16);
      problem.label = "splits";
      problem.batch = 1;
      problem.seqlen_q = 2;
      problem.seqlen_kv = keys;
      problem.num_heads_q = 2 * group;
      problem.num_heads_kv = 2;
      problem.head_dim_qk = problem.head_dim_v = 64;
      problem.mask = causal();
      problem.has_sinks = group == 7;
      expect_right(problem);
    }
  }
}

TEST_F(Gpu, PairsOfFeatures) {
  // Shapes, heads and head dims with every program and mask.
  for (const Feature& first : features()) {
    if (first.group.empty() || first.group == "products") continue;
    for (const Feature& second : features()) {
      if (second.group == first.group || second.group == "products") continue;
      if (!second.group.empty() && second.group < first.group) continue;
      Case problem = plain_case(Dtype::bf16);
      problem.label = fmt::format("{} + {}", first.name, second.name);
      first.add(problem);
      second.add(problem);
      expect_right(problem);
    }
  }
}

}  // namespace
}  // namespace fovea::testing
