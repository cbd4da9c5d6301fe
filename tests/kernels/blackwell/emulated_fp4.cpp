#include "kernels/blackwell/emulated_fp4.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/clear_counter.cuh"
#include "cuda/forward/sm100_fp4.hpp"
#include "cuda/forward/sm120_fp4.hpp"
#include "kernels/blackwell/fp4_cases.hpp"
#include "kernels/emulation_steps.hpp"
#include "problem/forward.hpp"
#include "sm100/attention_fp4.cuh"
#include "sm120/attention_fp4.cuh"
#include "sm120/round_to_fp4.cuh"
#include "support/launch_memory.hpp"

namespace fovea::cuda {

template <typename Params>
struct EmulatedFp4Of {
  std::string_view name;
  void (*attention)(const Params& params);
  // In the order of launches.
  void (*rounding[4])(const Fp4RoundingParams& params);
};
using EmulatedFp4 = EmulatedFp4Of<Fp4Params>;
using EmulatedTensorMemoryFp4 = EmulatedFp4Of<Sm100Fp4Params>;

}  // namespace fovea::cuda

// Written by print_blackwell_units from fp4_cases.hpp.
#include "fp4_units.inc"

namespace fovea::testing {
namespace {

/// What lies in workspace before a call.
constexpr unsigned char kGarbage = 0x5A;

template <typename Kernels, std::size_t n>
const Kernels& named(const Kernels (&all)[n], std::string_view name) {
  const auto* const found = std::ranges::find(all, name, &Kernels::name);
  if (found == std::end(all)) throw std::out_of_range(std::string(name));
  return *found;
}

template <typename Kernels>
void launch_rounding(const Kernels& kernels, const cuda::Fp4RoundingLaunch& rounding,
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

template <typename Launch>
struct Prepared {
  ForwardProblem problem;
  cuda::ForwardPlan plan;
  Launch call;
};

template <typename Kernel, typename PlanOf>
auto prepare(const std::string& label, const AttentionForward& args, PlanOf plan_of,
             Emulation& emulation) {
  using Launch = decltype(Kernel::prepare({}, {}, args, nullptr, nullptr, {}));
  Prepared<Launch> result{.problem = validate(problem_of(args), "test"), .plan = {}, .call = {}};
  result.plan = plan_of(label, result.problem);
  for (const TensorBytes& tensor : tensors_of_call(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
  const std::size_t bytes = (result.plan.workspace_bytes + 255) / 256 * 256;
  const auto workspace =
      emulation.device.buffer("workspace", std::vector<unsigned char>(bytes, kGarbage));
  result.call = Kernel::prepare(result.problem, result.plan, args, nullptr, workspace, {});
  return result;
}

}  // namespace

cuda::Fp4RoundingLaunch run_fp4_rounding(const std::string& label, const AttentionForward& args,
                                         Emulation& emulation) {
  const auto prepared = prepare<cuda::Sm120ForwardFp4>(label, args, fp4_plan, emulation);
  launch_rounding(named(cuda::kFp4s, label), prepared.call.rounding, emulation);
  return prepared.call.rounding;
}

cuda::Fp4RoundingLaunch run_tensor_memory_fp4_rounding(const std::string& label,
                                                       const AttentionForward& args,
                                                       Emulation& emulation) {
  const auto prepared =
      prepare<cuda::Sm100ForwardFp4>(label, args, tensor_memory_fp4_plan, emulation);
  launch_rounding(named(cuda::kTensorMemoryFp4s, label), prepared.call.rounding, emulation);
  return prepared.call.rounding;
}

void run_fp4(const std::string& label, const AttentionForward& args, Emulation& emulation) {
  auto prepared = prepare<cuda::Sm120ForwardFp4>(label, args, fp4_plan, emulation);
  cuda::Fp4Launch& call = prepared.call;
  build_tables(prepared.plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  launch_rounding(named(cuda::kFp4s, label), call.rounding, emulation);
  emulation.launch(call.common.grid, call.common.num_threads, prepared.plan.shared_bytes,
                   [&] { named(cuda::kFp4s, label).attention(call.params); });
  emulation.expect_launched(call.launches(prepared.plan));
}

void run_tensor_memory_fp4(const std::string& label, const AttentionForward& args,
                           Emulation& emulation) {
  auto prepared = prepare<cuda::Sm100ForwardFp4>(label, args, tensor_memory_fp4_plan, emulation);
  cuda::Sm100Fp4Launch& call = prepared.call;
  const auto& kernels = named(cuda::kTensorMemoryFp4s, label);
  build_tables(prepared.plan, call.roles.common, emulation);
  call.params.common.captures = call.roles.common.params.captures;
  if (call.roles.has_counter) {
    emulation.launch({.x = 1}, 1, 0,
                     [&] { cuda::clear_counter({.counter = call.params.next_tile}); });
  }
  launch_rounding(kernels, call.rounding, emulation);
  emulation.is_dependent = true;
  emulation.ctas_at_once = static_cast<int>(call.roles.num_ctas);
  emulation.launch({.x = call.roles.num_ctas}, call.roles.common.num_threads,
                   prepared.plan.shared_bytes, [&] { kernels.attention(call.params); });
  emulation.ctas_at_once = 1;
  emulation.is_dependent = false;
  emulation.expect_launched(call.launches(prepared.plan));
}

}  // namespace fovea::testing
