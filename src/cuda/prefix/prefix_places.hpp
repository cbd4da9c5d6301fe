// Where the keys and rows of a call with a shared prefix lie, found on an NVIDIA GPU before attention is computed. Read
// device/common/prefix_places.cuh for the kernel.
#pragma once

#include <memory>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/prefix_params.h"
#include "cuda/kernel_set.hpp"
#include "problem/shared_prefix.hpp"

namespace fovea::cuda {

/// One kernel for all layouts, loaded into a device.
struct PrefixPlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText prefix_text();

/// Throws Unsupported where nothing can run on this device.
PrefixPlan plan_prefix(Device device);

/// A call's parameters and grid; where they run is not known here.
struct PrefixLaunch {
  PrefixParams params;
  driver::Extent grid;
  unsigned num_threads = 0;

  KernelLaunches launches() const;
};
PrefixLaunch prefix_launch(const PrefixSource& source, const PrefixPlaces& places);

/// Enqueues on `stream` (CUstream) and returns. Tensors lie in the memory of the plan's device.
void write_prefix_places(const PrefixPlan& plan, const PrefixSource& source,
                         const PrefixPlaces& places, void* stream);

}  // namespace fovea::cuda
