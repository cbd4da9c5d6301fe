// Plans in stages (CompileMode::staged): calls run by a kernel that compiles in a fraction of a second until the
// table's choice, compiled beside them, is loaded; those that begin afterwards run by that. Read plan_ladder.hpp next.
#pragma once

#include <future>
#include <memory>
#include <string>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::cuda {

/// The next stage of a plan, and the last. Whoever calls has found out by the future alone: it is set once.
struct ForwardPlan::Later {
  std::string candidate;  // that is compiled
  std::shared_future<std::shared_ptr<const ForwardPlan>> plan;
};

/// Does the caller want stages, by the problem or by FOVEA_COMPILE? Throws InvalidArgument where the variable is no
/// word of these.
bool has_stages(const ForwardProblem& problem);

/// Loads `plan` into the device, or where that would compile and another kernel is ready sooner: that one, and `plan`
/// in the loader's background. The workspace is that of the greater. Throws what loading the first stage throws; what
/// the second throws is told to who asks for it.
ForwardPlan load_in_stages(jit::Loader& loader, const driver::DeviceContext& context,
                           const ForwardProblem& problem, ForwardPlan plan);

/// What runs calls that begin now. Throws why the last stage cannot be had, as soon as it is known.
const ForwardPlan& current_stage(const ForwardPlan& plan);

/// Has the last stage been reached, by all parts of the plan? Throws as current_stage.
bool is_final(const ForwardPlan& plan);

/// Returns when it has.
void wait_for_final(const ForwardPlan& plan);

/// Names the first stage in what explains `plan`, which nobody has loaded.
void tell_stages(const ForwardProblem& problem, ForwardPlan& plan);

}  // namespace fovea::cuda
