// The kernels of sm_80 under the emulator, on the feature matrix, against the oracle: what every access may do is checked beside.
#include "problem/forward.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "cuda/attention_forward.hpp"
#include "cuda/emulator/emulator.hpp"
#include "cuda/forward_launch.hpp"
#include "kernels/emulated_forward.hpp"
#include "kernels/forward_cases.hpp"
#include "support/kernel_compare.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {
namespace {

namespace emulator = cuda::emulator;

struct Emulation {
  emulator::Device device;
  emulator::Options options;
  std::string findings;

  void launch(cuda::Grid grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel) {
    if (grid.x == 0) return;
    const emulator::LaunchConfig config{
        .grid = {static_cast<std::int32_t>(grid.x), static_cast<std::int32_t>(grid.y), 1},
        .block = {static_cast<std::int32_t>(threads), 1, 1},
        .cluster = {},
        .shared_bytes = static_cast<std::uint32_t>(shared_bytes)};
    const emulator::Report report = device.launch(config, options, kernel);
    for (const emulator::Finding& finding : report.findings) findings += finding.text + "\n";
  }
};

void run_emulated(const std::string& label, Emulation& emulation, const AttentionForward& args) {
  const ForwardProblem problem = validate(problem_of(args), "test");
  const cuda::ForwardPlan plan = cuda::choose_forward(problem, cuda::typical_device(8, 0));
  for (const TensorBytes& tensor : tensors_of_call(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
  void* workspace = plan.workspace_bytes == 0
                        ? nullptr
                        : emulation.device.buffer<float>("workspace", plan.workspace_bytes / 4);
  const cuda::ForwardLaunch call = cuda::forward_launch(problem, plan, args, workspace, nullptr);
  emulation.launch(call.grid, call.num_threads, plan.shared_bytes,
                   [&] { cuda::forward_named(label)(call.params); });
  if (!plan.spec.is_split) return;
  emulation.launch(call.combine_grid, cuda::kCombineThreads, cuda::kCombineSharedBytes,
                   [&] { cuda::combine_of(plan.spec)(call.combine_params); });
}

class EmulatedForwards : public ::testing::TestWithParam<Case> {};

TEST_P(EmulatedForwards, EqualTheOracle) {
  const Case& problem = GetParam();
  for (const emulator::Landing landing : {emulator::Landing::earliest, emulator::Landing::latest}) {
    Emulation emulation;
    emulation.options = {.seed = 1, .landing = landing};
    expect_kernel_equals_oracle(problem, [&](const AttentionForward& args) {
      run_emulated(problem.label, emulation, args);
    });
    EXPECT_EQ(emulation.findings, "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedForwards, ::testing::ValuesIn(kernel_cases()),
                         [](const auto& info) { return info.param.label; });

}  // namespace
}  // namespace fovea::testing
