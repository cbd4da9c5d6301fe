// Rows turned by their positions on an NVIDIA GPU. Read device/common/rotary.cuh for the kernel.
#pragma once

#include <memory>

#include "fovea/rotary.hpp"

#include "cuda/device/shared/rotary_params.h"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// One kernel for all dtypes and layouts, loaded into a device.
struct RotaryPlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText rotary_text();

/// Throws Unsupported where nothing can run on this device.
RotaryPlan plan_rotary(Device device);

/// A call's parameters and grid; where they run is not known here.
struct RotaryLaunch {
  RotaryParams params;
  driver::Extent grid;
  unsigned num_threads = 0;

  KernelLaunches launches() const;
};
RotaryLaunch rotary_launch(const ApplyRotary& args);

/// Enqueues on args.stream and returns. Arguments have been validated and lie in the memory of the plan's device.
void rotary(const RotaryPlan& plan, const ApplyRotary& args);

}  // namespace fovea::cuda
