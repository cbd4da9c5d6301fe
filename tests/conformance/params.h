// What every conformance kernel takes. Read kernels.cuh next.
#pragma once

#include "shared/types.h"

namespace fovea::cuda::conformance {

struct alignas(64) Params {
  std::uint64_t map[16];  // a TensorMap
  const void* in;
  void* out;
  std::uint64_t a[2], b[2];  // matrix descriptors of two steps of depth, of tiles at address 0
  std::int32_t n[16];        // sizes, offsets and coordinates: each kernel says which
};

}  // namespace fovea::cuda::conformance
