// Apart from the other steps: programs whose kernels take other parameters have none that it could call.
#include "kernels/emulated_forward.hpp"
#include "kernels/emulation_steps.hpp"

namespace fovea::testing {

void launch_forward(const Run& run, const cuda::ForwardPlan& plan, cuda::ForwardLaunch& call,
                    Emulation& emulation) {
  build_tables(plan, call, emulation);
  emulation.launch(call.grid, call.num_threads, plan.shared_bytes,
                   [&] { cuda::forward_named(run.label)(call.params); });
  if (plan.spec->is_split) join_splits(run, plan, call, emulation);
  clear_rows(call, emulation);
}

}  // namespace fovea::testing
