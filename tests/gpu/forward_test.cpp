// Attention forward on a GPU against the oracle: the feature matrix, tile edges, both 16-bit dtypes and f32. Without a driver or a
// device everything is skipped.
#include "problem/forward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/driver/resources.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"
#include "support/case.hpp"
#include "support/features.hpp"
#include "support/kernel_compare.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {
namespace {

using cuda::driver::DeviceMemory;
using cuda::driver::Stream;

constexpr std::size_t kAlignment = 256;

/// A tensor's bytes on the device, as far from an aligned address as on the host.
struct DeviceCopy {
  TensorBytes host;
  DeviceMemory memory;

  explicit DeviceCopy(const TensorBytes& bytes)
      : host(bytes), memory(cuda::driver::process_context(0), bytes.size + 2 * kAlignment) {
    std::vector<std::byte> staged(memory.bytes(), std::byte{0xFF});
    std::memcpy(staged.data() + offset(), host.begin, host.size);
    memory.copy_from(staged, Stream(nullptr));
  }

  std::size_t offset() const { return reinterpret_cast<std::uintptr_t>(host.begin) % kAlignment; }
  std::byte* begin() const { return static_cast<std::byte*>(memory.data()) + offset(); }

  void copy_back() const {
    std::vector<std::byte> staged(memory.bytes());
    memory.copy_to(staged, Stream(nullptr));
    std::memcpy(host.begin, staged.data() + offset(), host.size);
    for (std::size_t i = 0; i < staged.size(); ++i) {
      const bool is_guard = i < offset() || i >= offset() + host.size;
      if (is_guard && staged[i] != std::byte{0xFF}) {
        ADD_FAILURE() << "wrote outside of " << host.name;
        return;
      }
    }
  }
};

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
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  for (const TensorBytes& tensor : tensors_of_call(args))
    copies.push_back(std::make_unique<DeviceCopy>(tensor));
  DeviceMemory workspace(cuda::driver::process_context(0), plan.workspace_bytes + 1);
  workspace.fill(0xFF, Stream(nullptr));
  cuda::ForwardLaunch call = cuda::forward_launch(problem, plan, args, workspace.data(), nullptr);
  move_tensors(call, [&](const void* host) -> const void* {
    const auto* address = static_cast<const std::byte*>(host);
    for (const auto& copy : copies) {
      if (address >= copy->host.begin && address < copy->host.begin + copy->host.size)
        return copy->begin() + (address - copy->host.begin);
    }
    return host;
  });
  cuda::place_range_tables(plan, workspace.data(), call);
  cuda::launch_forward(plan, call, nullptr);
  for (const auto& copy : copies) {
    if (copy->host.is_output) copy->copy_back();
  }
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
                         [](const auto& info) { return std::string(info.param.name); });

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
