#include "kernels/blackwell/emulated_fp4.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "kernels/blackwell/fp4_cases.hpp"
#include "kernels/emulation_steps.hpp"
#include "problem/forward.hpp"
#include "sm120/attention_fp4.cuh"
#include "sm120/round_to_fp4.cuh"
#include "support/launch_memory.hpp"

namespace fovea::cuda {

struct EmulatedFp4 {
  std::string_view name;
  void (*attention)(const Fp4Params& params);
  // In the order of launches.
  void (*rounding[4])(const Fp4RoundingParams& params);
};

}  // namespace fovea::cuda

// Written by print_blackwell_units from fp4_cases.hpp.
#include "fp4_units.inc"

namespace fovea::testing {
namespace {

/// What lies in workspace before a call.
constexpr unsigned char kGarbage = 0x5A;

const cuda::EmulatedFp4& kernels_named(std::string_view name) {
  const auto* const found = std::ranges::find(cuda::kFp4s, name, &cuda::EmulatedFp4::name);
  if (found == std::end(cuda::kFp4s)) throw std::out_of_range(std::string(name));
  return *found;
}

void launch_rounding(const cuda::EmulatedFp4& kernels, const cuda::Fp4RoundingLaunch& rounding,
                     Emulation& emulation) {
  cuda::KernelLaunches launches;
  rounding.add_to(launches);
  std::size_t step = 0;
  for (const cuda::KernelLaunch& each : launches) {
    const auto run = kernels.rounding[step++];
    emulation.launch({.x = each.grid.x}, each.num_threads, each.shared_bytes,
                     [&] { run(rounding.params); });
  }
}

struct Prepared {
  ForwardProblem problem;
  cuda::ForwardPlan plan;
  cuda::Fp4Launch call;
};

Prepared prepare(const std::string& label, const AttentionForward& args, Emulation& emulation) {
  Prepared result{.problem = validate(problem_of(args), "test"), .plan = {}, .call = {}};
  result.plan = fp4_plan(label, result.problem);
  for (const TensorBytes& tensor : tensors_of_call(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
  const std::size_t bytes = (result.plan.workspace_bytes + 255) / 256 * 256;
  const auto workspace =
      emulation.device.buffer("workspace", std::vector<unsigned char>(bytes, kGarbage));
  result.call =
      cuda::Sm120ForwardFp4::prepare(result.problem, result.plan, args, nullptr, workspace, {});
  return result;
}

}  // namespace

cuda::Fp4Launch run_fp4_rounding(const std::string& label, const AttentionForward& args,
                                 Emulation& emulation) {
  const Prepared prepared = prepare(label, args, emulation);
  launch_rounding(kernels_named(label), prepared.call.rounding, emulation);
  return prepared.call;
}

void run_fp4(const std::string& label, const AttentionForward& args, Emulation& emulation) {
  Prepared prepared = prepare(label, args, emulation);
  cuda::Fp4Launch& call = prepared.call;
  build_tables(prepared.plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  launch_rounding(kernels_named(label), call.rounding, emulation);
  emulation.launch(call.common.grid, call.common.num_threads, prepared.plan.shared_bytes,
                   [&] { kernels_named(label).attention(call.params); });
  emulation.expect_launched(call.launches(prepared.plan));
}

}  // namespace fovea::testing
