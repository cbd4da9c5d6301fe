// New tokens of a cache on an NVIDIA GPU, before attention is computed. Read device/common/append_to_cache.cuh for the
// kernel.
#pragma once

#include <memory>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/append_params.h"
#include "cuda/kernel_set.hpp"
#include "problem/cache.hpp"

namespace fovea::cuda {

/// One kernel for all dtypes and layouts, loaded into a device.
struct AppendPlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText append_text();

/// Throws Unsupported where nothing can run on this device.
AppendPlan plan_append(Device device);

/// A call's parameters and grid; where they run is not known here. Throws Unsupported for more than 2^31 tokens.
struct AppendLaunch {
  AppendParams params;
  driver::Extent grid, block;

  KernelLaunches launches() const;
};
AppendLaunch append_launch(const NewTokens& tokens);

/// Enqueues on `stream` (CUstream) and returns. Arguments have been validated and lie in the memory of the plan's
/// device.
void append_tokens(const AppendPlan& plan, const NewTokens& tokens, void* stream);

}  // namespace fovea::cuda
