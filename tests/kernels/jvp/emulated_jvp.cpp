#include "kernels/jvp/emulated_jvp.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "common/range_table.cuh"
#include "cuda/jvp/launch.hpp"
#include "kernels/backward/backward_cases.hpp"
#include "problem/jvp.hpp"
#include "support/launch_memory.hpp"

namespace fovea::testing {
namespace {

const cuda::EmulatedJvp& jvp_named(std::string_view name) {
  for (const auto& part : {cuda::half_of_jvps(), cuda::other_half_of_jvps()}) {
    const auto found = std::ranges::find(part, name, &cuda::EmulatedJvp::name);
    if (found != part.end()) return *found;
  }
  throw std::out_of_range(std::string(name));
}

}  // namespace

void run_jvp(std::string_view label, const AttentionJvp& args, Emulation& emulation) {
  const TangentProblem problem = validate(problem_of(args), "test");
  const cuda::DeviceTraits device = device_of(std::string(label));
  const cuda::JvpPlan plan = cuda::choose_jvp(problem, device);
  emulation.compute_capability = device.compute_capability();
  const cuda::EmulatedJvp& kernel = jvp_named(label);
  for (const TensorBytes& tensor : tensors_of_tangents(args))
    emulation.device.register_buffer(tensor.name, tensor.begin, tensor.size);
  auto* const workspace = emulation.device.buffer<std::byte>("range tables", plan.workspace_bytes);
  const cuda::JvpLaunch call = cuda::jvp_launch(problem, plan, args, workspace);
  if (const cuda::RangeTableLaunch& tables = call.range_tables; !tables.is_empty()) {
    emulation.launch({.x = tables.num_groups, .y = tables.num_tables}, 32 * cuda::kRunsPerGroup,
                     cuda::kRunsPerGroup * sizeof(cuda::RangeEntry),
                     [&] { cuda::build_range_tables(tables.params); });
  }
  for (int i = 0; i < call.num_launches; ++i) {
    emulation.launch({.x = call.num_ctas}, static_cast<std::uint32_t>(plan.spec.num_warps) * 32,
                     plan.shared_bytes, [&] { kernel.main(call.params[i]); });
  }
}

}  // namespace fovea::testing
