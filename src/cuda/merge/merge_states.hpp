// States of attention over parts of the keys, joined on an NVIDIA GPU. Read device/common/merge_states.cuh for the
// kernel.
#pragma once

#include <memory>

#include "fovea/state.hpp"

#include "cuda/device/shared/merge_params.h"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// One kernel for all dtypes and layouts, loaded into a device.
struct MergePlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText merge_text();

/// Throws Unsupported for more states or rows than the kernel takes.
void refuse_merge(const MergeStates& args);

/// Throws Unsupported where nothing can run on this device.
MergePlan plan_merge(Device device);

/// A call's parameters and grid; where they run is not known here. Throws as refuse_merge.
struct MergeLaunch {
  MergeParams params;
  driver::Extent grid;
  unsigned num_threads = 0;

  KernelLaunches launches() const;
};
MergeLaunch merge_launch(const MergeStates& args);

/// Enqueues on args.stream and returns. Arguments have been validated and lie in the memory of the plan's device.
void merge_states(const MergePlan& plan, const MergeStates& args);

}  // namespace fovea::cuda
