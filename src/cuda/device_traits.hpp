// What kernels are chosen by: a device as a few numbers. Nothing here needs a GPU.
#pragma once

#include <cstdint>

#include "cuda/device/shared/instructions.h"
#include "cuda/driver/driver.hpp"
#include "cuda/jit/architecture.hpp"

namespace fovea::cuda {

struct DeviceTraits {
  int major = 0, minor = 0;  // compute capability; AMD's have none
  /// The instruction set of an AMD GPU, as its name has it: 0x942 of gfx942. 0: it is NVIDIA's.
  int gfx = 0;
  int warp_lanes = 32;
  int num_sms = 0;
  int shared_bytes_per_cta = 0;  // dynamic
  int shared_bytes_per_sm = 0;
  std::int64_t l2_bytes = 0;

  int compute_capability() const { return major * 10 + minor; }
  /// And tcgen05, whose products lie there.
  bool has_tensor_memory() const {
    return compute_capability() == 100 || compute_capability() == 103;
  }
  bool is_amd() const { return gfx != 0; }
  Instructions instructions() const { return major < 8 ? Instructions::sm75 : Instructions::sm80; }
};

/// The driver keeps so much shared memory of each CTA. On 7.5 it keeps none: no tile of several CTAs needs the last KB.
inline constexpr int kReservedSharedBytes = 1024;

DeviceTraits traits_of(const driver::DeviceInfo& info);

/// Of a typical device of an architecture, for plans made where there is none: packs, compile tests, explain.
DeviceTraits typical_device(int major, int minor);

/// The same of AMD, 0x942 for gfx942. Throws InvalidArgument for what is none of jit::amd_targets().
DeviceTraits typical_amd_device(int gfx);

/// Of either.
DeviceTraits typical_device(jit::Architecture architecture);

}  // namespace fovea::cuda
