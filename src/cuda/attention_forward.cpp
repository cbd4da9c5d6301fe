// Fill params, launch. No branch on features.
#include "cuda/attention_forward.hpp"

#include "core/check.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/forward_kernels.hpp"
#include "cuda/forward_launch.hpp"

namespace fovea::cuda {

void attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, void* workspace, void* stream,
                       const GrownCache* cache) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  const ForwardLaunch call = forward_launch(problem, plan, args, workspace, cache);
  driver::launch({.grid = {.x = call.grid.x, .y = call.grid.y},
                  .block = {.x = call.num_threads},
                  .shared_bytes = static_cast<unsigned>(plan.shared_bytes),
                  .stream = driver::Stream(stream)},
                 plan.kernels->forward->function, call.params);
  if (!plan.spec.is_split) return;
  driver::launch({.grid = {.x = call.combine_grid.x},
                  .block = {.x = kCombineThreads},
                  .shared_bytes = kCombineSharedBytes,
                  .stream = driver::Stream(stream)},
                 plan.kernels->combine->function, call.combine_params);
}

}  // namespace fovea::cuda
