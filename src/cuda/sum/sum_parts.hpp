// Tensors of one shape, added or copied on an NVIDIA GPU: what ranks of context parallelism do with parts beside
// attention. Read device/common/sum_parts.cuh for the kernel.
#pragma once

#include <memory>
#include <span>

#include "fovea/tensor.hpp"

#include "cuda/device/shared/sum_params.h"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// One kernel for all dtypes and layouts, loaded into a device.
struct SumPlan {
  std::shared_ptr<const KernelSet> kernels;
};

jit::KernelText sum_text();

/// Throws Unsupported where nothing can run on this device.
SumPlan plan_sum(Device device);

/// A call's parameters and grid; where they run is not known here.
struct SumLaunch {
  SumParams params;
  driver::Extent grid;
  unsigned num_threads = 0;

  KernelLaunches launches() const;
};
/// A tensor that is added. With places, [size of the sum's first dimension] i32, what stands at that index of it; -1:
/// nothing. Without, index for index.
struct SumPart {
  TensorView tensor{};
  TensorView places{};
};

/// At most kMostSummedParts parts. Dimensions that follow each other in every tensor are one, but for the first one
/// where parts have places; throws Unsupported where more than four are left, or more rows than a grid has.
SumLaunch sum_launch(const TensorView& sum, std::span<const SumPart> parts, Fold fold = Fold::sum);

/// sum = Σ parts, in their order, or the largest of each element: enqueued on the stream.
void sum_parts(const SumPlan& plan, const TensorView& sum, std::span<const SumPart> parts,
               Fold fold, driver::Stream stream);

}  // namespace fovea::cuda
