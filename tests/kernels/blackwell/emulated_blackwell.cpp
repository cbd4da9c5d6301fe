#include "kernels/blackwell/emulated_blackwell.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/clear_counter.cuh"
#include "common/clear_rows.cuh"
#include "common/range_table.cuh"
#include "cuda/emulator/tensor_map.hpp"
#include "cuda/forward/sm100.hpp"
#include "kernels/blackwell/blackwell_cases.hpp"
#include "kernels/emulated_forward.hpp"
#include "kernels/emulation_steps.hpp"
#include "sm100/attention_forward.cuh"

namespace fovea::cuda {

struct EmulatedBlackwell {
  std::string_view name;
  void (*run)(const Sm90ForwardParams& params);
};

}  // namespace fovea::cuda

// Written by print_blackwell_units from blackwell_cases.hpp.
#include "blackwell_units.inc"

namespace fovea::cuda {

void run_clear_rows(const ClearRowsParams& params) { clear_rows(params); }
void run_range_tables(const RangeTableParams& params) { build_range_tables(params); }

}  // namespace fovea::cuda

namespace fovea::testing {
namespace {

/// What lies in workspace before a call.
constexpr unsigned char kGarbage = 0x5A;

const cuda::EmulatedBlackwell& kernel_named(std::string_view name) {
  const auto* const found =
      std::ranges::find(cuda::kBlackwells, name, &cuda::EmulatedBlackwell::name);
  if (found == std::end(cuda::kBlackwells)) throw std::out_of_range(std::string(name));
  return *found;
}

cuda::TensorMapParam encode(const cuda::driver::TensorMapSpec& spec, const void* address) {
  return cuda::emulator::encode_tensor_map<cuda::TensorMapParam>(spec, address);
}

}  // namespace

void run_blackwell(const Run& run, Emulation& emulation) {
  using cuda::emulator::TensorOrder;
  const cuda::ForwardPlan plan = blackwell_plan(run.label, run.problem);
  const auto& spec = plan.spec.as<cuda::Sm100ForwardSpec>();
  const bool trusts_pipe = sm100_tensor_layout(spec).is_p_over_s && !spec.awaits_sums;
  emulation.options.tensor_order = trusts_pipe ? TensorOrder::pipe : TensorOrder::text;
  start(run, emulation);
  const auto workspace = emulation.device.buffer(
      "workspace", std::vector<unsigned char>((plan.workspace_bytes + 255) / 256 * 256, kGarbage));
  cuda::Sm90Launch call =
      cuda::Sm100Forward::prepare(run.problem, plan, run.args, run.cache, workspace, encode);
  build_tables(plan, call.common, emulation);
  call.params.common.captures = call.common.params.captures;
  if (call.has_counter) {
    emulation.launch({.x = 1}, 1, 0,
                     [&] { cuda::clear_counter({.counter = call.params.next_tile}); });
  }
  emulation.is_dependent = call.has_counter;
  emulation.ctas_at_once = static_cast<int>(call.num_ctas);
  emulation.launch({.x = call.num_ctas}, call.common.num_threads, plan.shared_bytes,
                   [&] { kernel_named(run.label).run(call.params); });
  emulation.ctas_at_once = 1;
  emulation.is_dependent = false;
  const std::span words(call.params.next_redo, static_cast<std::size_t>(call.params.num_tiles));
  emulation.num_redone =
      std::ranges::count_if(words, [](std::int32_t next) { return next != kGarbage * 0x01010101; });
  if (plan.spec->is_split) join_splits(run, plan, call.common, emulation);
  clear_rows(call.common, emulation);
  emulation.expect_launched(call.launches(plan));
}

}  // namespace fovea::testing
