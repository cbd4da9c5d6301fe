// global_load_lds of CDNA: copies from global memory into LDS that pass through no register and that a wave waits for
// when it must.
//
// A copy is the wave's, not a lane's: lane l's bytes land at an address that all lanes share, plus l times as many.
// Whoever wants another order in LDS reads in another order.
//
// Waits count: vmcnt is how many loads and copies of the wave are under way, and they land in the order of issue.
// Barriers wait for no copies, and fences as the compiler likes (LLVM 22: for all of them), so: wait, then
// sync_threads(), and all of the workgroup may read.
// Note: ordinary loads count too, but the compiler moves them and waits for them as it likes. So N is of copies alone;
// loads beside them make a wait longer, never shorter.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

/// So many bytes of each lane: 4, or 16 on gfx950. `to`: the same in all lanes; it and `from` are multiples of `bytes`.
template <int bytes>
FOVEA_DEVICE void copy_to_shared(SharedAddress to, const void* from) {
  using GlobalBytes = __attribute__((address_space(1))) void;  // the builtin takes no const
  using LocalBytes = __attribute__((address_space(3))) void;
  if constexpr (bytes == 16) {
#if defined(__gfx950__)
    __builtin_amdgcn_global_load_lds((GlobalBytes*)from, (LocalBytes*)to, 16, 0, 0);
#else
    static_assert(bytes == 4, "copies of 16 bytes a lane are gfx950's");
#endif
  } else {
    static_assert(bytes == 4, "a lane's copy has 4 or 16 bytes");
    __builtin_amdgcn_global_load_lds((GlobalBytes*)from, (LocalBytes*)to, 4, 0, 0);
  }
}

/// s_waitcnt vmcnt(N): all copies of this wave but the newest N have landed. N is at most 63.
template <int N>
FOVEA_DEVICE void wait_for_copies() {
  static_assert(N >= 0 && N < 64, "vmcnt has six bits");
  constexpr int kNoOtherCount = 7 << 4 | 15 << 8;  // expcnt and lgkmcnt as they may be at most
  __builtin_amdgcn_s_waitcnt((N & 15) | (N >> 4) << 14 | kNoOtherCount);
}

}  // namespace fovea::cuda::ptx
