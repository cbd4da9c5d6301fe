// Loads and copies of CDNA through a buffer: memory that scalar registers describe, by a base and a length. A lane says
// where in it, in 32 bits; what lies behind its end is 0 and is not touched. So a wave that goes through rows computes
// in scalar registers where they begin, and vector instructions compute nothing.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

using Buffer = __amdgpu_buffer_rsrc_t;

/// `base` and `bytes` are the same in all lanes.
FOVEA_DEVICE Buffer make_buffer(const void* base, std::uint32_t bytes) {
  constexpr int kRaw = 0x00020000;  // words of 32 bits, no swizzle
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, static_cast<int>(bytes),
                                           kRaw);
}

/// A word of what nobody writes.
FOVEA_DEVICE std::uint32_t ld_buffer(Buffer buffer, std::uint32_t at) {
  return __builtin_amdgcn_raw_buffer_load_b32(buffer, static_cast<int>(at), 0, 0);
}

/// As copy_to_shared, of which this is one: lanes side by side from `to` on, 4 bytes or, on gfx950, 16. What is behind
/// the end becomes 0 there.
template <int bytes>
FOVEA_DEVICE void copy_buffer_to_shared(SharedAddress to, Buffer buffer, std::uint32_t at) {
  using LocalBytes = __attribute__((address_space(3))) void;
  const auto from = static_cast<int>(at);
  if constexpr (bytes == 16) {
#if defined(__gfx950__)
    __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer, (LocalBytes*)to, 16, from, 0, 0, 0);
#else
    static_assert(bytes == 4, "copies of 16 bytes a lane are gfx950's");
#endif
  } else {
    static_assert(bytes == 4, "a lane's copy has 4 or 16 bytes");
    __builtin_amdgcn_raw_ptr_buffer_load_lds(buffer, (LocalBytes*)to, 4, from, 0, 0, 0);
  }
}

}  // namespace fovea::cuda::ptx
