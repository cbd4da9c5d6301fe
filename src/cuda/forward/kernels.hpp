// From the choice of a forward plan to kernels that are loaded into a device. Read plan_ladder.hpp for the steps.
#pragma once

#include <mutex>
#include <utility>

#include "cuda/forward/attention_forward.hpp"
#include "cuda/plan_ladder.hpp"

namespace fovea::cuda {

struct ForwardOperation {
  using Problem = ForwardProblem;
  using Plan = ForwardPlan;
  static ForwardPlan choose(const ForwardProblem& problem, const DeviceTraits& device);
  static ForwardPlan choose_measured(const ForwardProblem& problem, const DeviceTraits& device);
  static PlannedKernels planned_kernels(const ForwardPlan& plan);
  static ForwardPlan refused_by_all(const std::string& reason);
};
using ForwardLadder = PlanLadder<ForwardOperation>;

/// A plan of the same problem by a kernel that reads tensors wherever they start. Few calls need one, so the first that
/// does loads it.
class ForwardPlan::Unaligned {
 public:
  explicit Unaligned(ForwardPlan plan) : plan_(std::move(plan)) {}

  /// As it was chosen.
  const ForwardPlan& plan() const { return plan_; }
  /// Loaded as `kernels` were, by the same loader into the same context. Thread safe.
  const ForwardPlan& loaded(const KernelSet& kernels);

 private:
  ForwardPlan plan_;
  std::once_flag once_;
};

}  // namespace fovea::cuda
