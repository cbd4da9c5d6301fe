// The kernels of a forward plan, loaded into a device.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "cuda/attention_forward.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::cuda {

struct ForwardPlan::Kernels {
  std::shared_ptr<const jit::LoadedKernel> forward;
  // Where the spec is split; which of them, each launch says.
  std::shared_ptr<const jit::LoadedKernel> deep_combine, wide_combine;
  std::shared_ptr<const jit::LoadedKernel> range_tables;   // where the mask needs some
  std::shared_ptr<const jit::LoadedKernel> clear_counter;  // where the spec is dynamic
  jit::Loader* loader = nullptr;                           // that has loaded them
};

/// A plan of the same problem by a kernel that reads tensors wherever they start. Few calls need one, so the first that
/// does loads it.
class ForwardPlan::Unaligned {
 public:
  explicit Unaligned(ForwardPlan plan) : plan_(std::move(plan)) {}

  /// As it was chosen.
  const ForwardPlan& plan() const { return plan_; }
  /// Loaded as `kernels` were, by the same loader into the same context. Thread safe.
  const ForwardPlan& loaded(const Kernels& kernels);

 private:
  ForwardPlan plan_;
  std::once_flag once_;
};

DeviceTraits traits_of(const driver::DeviceInfo& info);

/// Loads what the plan was chosen to run.
void load_kernels(jit::Loader& loader, const driver::DeviceContext& context, ForwardPlan& plan);

/// The same; what was measured is no reason to fail: where its kernel cannot be had, the table's choice is taken, and
/// plan.tuning says so.
void load_or_fall_back(jit::Loader& loader, const driver::DeviceContext& context,
                       const ForwardProblem& problem, ForwardPlan& plan);

/// What load_or_fall_back would leave of a plan as long as kernels compile, without compiling or loading any; candidate
/// is empty where it would throw Unsupported.
void check_kernels(jit::Loader& loader, jit::Architecture architecture,
                   const ForwardProblem& problem, ForwardPlan& plan);

}  // namespace fovea::cuda
