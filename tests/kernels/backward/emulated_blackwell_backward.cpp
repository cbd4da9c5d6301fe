#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/backward_delta.cuh"
#include "kernels/backward/backward_cases.hpp"
#include "kernels/backward/backward_steps.hpp"
#include "kernels/backward/emulated_backward.hpp"
#include "problem/backward.hpp"
#include "sm100/attention_backward.cuh"
#include "sm80/attention_backward.cuh"
#include "sm80/captured_gradients.cuh"
#include "sm90/backward/finish_queries.cuh"
#include "sm90/backward/prepare_rows.cuh"

// Written by print_backward_units from backward_cases.hpp.
#include "blackwell_backward_units.inc"

namespace fovea::cuda {

const EmulatedHopperBackward& blackwell_backward_named(std::string_view name) {
  const auto* const found =
      std::ranges::find(kBlackwellBackwards, name, &EmulatedHopperBackward::name);
  if (found == std::end(kBlackwellBackwards)) throw std::out_of_range(std::string(name));
  return *found;
}

}  // namespace fovea::cuda

namespace fovea::testing {

void run_blackwell_backward(const std::string& label, const AttentionBackward& args,
                            int ctas_at_once, Emulation& emulation) {
  using cuda::emulator::TensorOrder;
  const GradientProblem problem = validate(problem_of(args), "test");
  const cuda::BackwardPlan plan = blackwell_backward_plan(label, problem);
  const auto& spec = plan.steps.front().spec.as<cuda::Sm100BackwardSpec>();
  const bool trusts_pipe = sm100_backward_tensor_layout(spec).is_dq_over_ds && !spec.awaits_keys;
  emulation.options.tensor_order = trusts_pipe ? TensorOrder::pipe : TensorOrder::text;
  run_key_walk(problem, plan, args, cuda::blackwell_backward_named(label), ctas_at_once, emulation);
}

}  // namespace fovea::testing
