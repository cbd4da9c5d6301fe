// The emulated twin of src/cuda/amd/ptx/buffer.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

struct Buffer {
  const char* base;
  std::uint32_t bytes;
};

FOVEA_DEVICE Buffer make_buffer(const void* base, std::uint32_t bytes) {
  return {static_cast<const char*>(base), bytes};
}

FOVEA_DEVICE std::uint32_t ld_buffer(Buffer buffer, std::uint32_t at, Site site = Site::here()) {
  if (std::uint64_t{at} + 4 > buffer.bytes) return 0;
  std::uint32_t value = 0;
  emulator::load_global_nc(buffer.base + at, &value, sizeof value, {"buffer_load", site});
  return value;
}

template <int bytes>
FOVEA_DEVICE void copy_buffer_to_shared(SharedAddress to, Buffer buffer, std::uint32_t at,
                                        Site site = Site::here()) {
  static_assert(bytes == 4 || bytes == 16, "a lane's copy has 4 or 16 bytes");
  const bool is_there = std::uint64_t{at} + bytes <= buffer.bytes;
  emulator::copy_to_shared(to, is_there ? buffer.base + at : nullptr, bytes,
                           {"buffer_load_lds", site});
}

}  // namespace fovea::cuda::ptx
