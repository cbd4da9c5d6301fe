// A kernel's row of the table of candidates, from what its files give it. Read candidates.hpp for the row.
#pragma once

#include <cstddef>
#include <vector>

#include "core/check.hpp"
#include "cuda/driver/context.hpp"
#include "cuda/forward/attention_forward.hpp"
#include "cuda/forward/candidates.hpp"
#include "cuda/kernel_set.hpp"
#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {

/// Enqueues what a kernel prepares for a call.
template <typename Kernel>
void launch_call(const ForwardProblem& problem, const ForwardPlan& plan,
                 const AttentionForward& args, void* workspace, void* stream_handle,
                 const GrownCache* cache) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  const KernelSet& kernels = *plan.kernels;
  const driver::Stream stream(stream_handle);
  const driver::ContextScope scope(kernels.context(), stream.handle());
  const auto call = Kernel::prepare(problem, plan, args, cache, workspace,
                                    encoder_of(kernels.context().driver()));
  enqueue(kernels, call.launches(plan), stream);
}

/// The row of a kernel: its files name it Sm80Forward, Sm90Decode, ... and give it what a row asks for, with specs of
/// its own type.
template <typename Kernel>
constexpr Candidate candidate_of() {
  using Spec = typename Kernel::Spec;
  return {
      .name = Kernel::kName,
      .header = Kernel::kHeader,
      .entry = Kernel::kEntry,
      .params = Kernel::kParams,
      .multiplies_by_wgmma = Kernel::kMultipliesByWgmma,
      .is_chained = Kernel::kIsChained,
      .reads_numbers_of_codes = Kernel::kReadsNumbersOfCodes,
      .refuses = Kernel::refuses,
      .choose = [](const ForwardProblem& problem, const DeviceTraits& device) -> AnyForwardSpec {
        return Kernel::choose(problem, device);
      },
      .alternatives =
          [](const ForwardProblem& problem, const DeviceTraits& device) {
            const std::vector<Spec> specs = Kernel::alternatives(problem, device);
            return std::vector<AnyForwardSpec>(specs.begin(), specs.end());
          },
      .reads = Kernel::kReads,
      .shared_bytes =
          [](const AnyForwardSpec& spec) { return Kernel::shared_bytes(spec.as<Spec>()); },
      .scratch_bytes =
          [](const AnyForwardSpec& spec, const ForwardProblem& problem) {
            return Kernel::scratch_bytes(spec.as<Spec>(), problem);
          },
      .launch = launch_call<Kernel>};
}

}  // namespace fovea::cuda
