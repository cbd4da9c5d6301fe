// ptx/ for one thread of the host: what printed programs call, with errors as large as the PTX ISA allows. The
// emulator's twins in src/cuda/emulator/device/ptx round as well as the host can; these here show what the
// approximations may do.
#pragma once

#include "shared/types.h"

#define FOVEA_DEVICE static inline
#define FOVEA_DEVICE_MEMBER inline

namespace fovea::cuda::ptx {

using SharedAddress = std::uint32_t;

struct Index3 {
  std::int32_t x, y, z;
};

template <class To, class From>
FOVEA_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits move between types of one size");
  return __builtin_bit_cast(To, from);
}

}  // namespace fovea::cuda::ptx
