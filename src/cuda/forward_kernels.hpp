// The kernels of a forward plan, loaded into a device.
#pragma once

#include <memory>

#include "cuda/attention_forward.hpp"
#include "cuda/jit/loader.hpp"

namespace fovea::cuda {

struct ForwardPlan::Kernels {
  std::shared_ptr<const jit::LoadedKernel> forward;
  std::shared_ptr<const jit::LoadedKernel> combine;       // where the spec is split
  std::shared_ptr<const jit::LoadedKernel> range_tables;  // where the mask needs some
};

}  // namespace fovea::cuda
