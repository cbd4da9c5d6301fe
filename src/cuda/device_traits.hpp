// What kernels are chosen by: a device as a few numbers. Nothing here needs a GPU.
#pragma once

#include <cstdint>

#include "cuda/driver/driver.hpp"

namespace fovea::cuda {

struct DeviceTraits {
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
  int shared_bytes_per_cta = 0;  // dynamic
  int shared_bytes_per_sm = 0;
  std::int64_t l2_bytes = 0;

  int compute_capability() const { return major * 10 + minor; }
};

/// The driver keeps so much shared memory of each CTA.
inline constexpr int kReservedSharedBytes = 1024;

DeviceTraits traits_of(const driver::DeviceInfo& info);

/// Of a typical device of an architecture, for plans made where there is none: packs, compile tests, explain.
DeviceTraits typical_device(int major, int minor);

}  // namespace fovea::cuda
