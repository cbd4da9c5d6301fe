// Loads of one thread of the host. Read base.cuh first.
#pragma once

#include <cstring>

#include "ptx/base.cuh"

namespace fovea::cuda::ptx {

template <class T>
FOVEA_DEVICE T ld_global_nc(const T* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace fovea::cuda::ptx
