// Loads, stores, atomics and prefetches of global and shared memory. Vectors of registers, which other files take and
// give, are named here. Read math.cuh or warp.cuh next; copies that do not pass through registers are in cp_async.cuh,
// bulk.cuh, tma.cuh.
#pragma once

#include "ptx/base.cuh"
#include "shared/cache_policy.h"

namespace fovea::cuda::ptx {

struct alignas(8) U32x2 {
  std::uint32_t x, y;
};
struct alignas(16) U32x4 {
  std::uint32_t x, y, z, w;
};
struct alignas(8) F32x2 {
  float x, y;
};
struct alignas(16) F32x4 {
  float x, y, z, w;
};

/// ld.global (Data Movement), 1, 2, 4, 8 or 16 bytes; `from` must be aligned to them. Keeps its place among other
/// memory operations.
template <class T>
FOVEA_DEVICE T ld_global(const T* from) {
  if constexpr (sizeof(T) == 1) {
    std::uint16_t r;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(r) : "l"(from) : "memory");
    return bit_cast<T>(static_cast<std::uint8_t>(r));
  } else if constexpr (sizeof(T) == 2) {
    std::uint16_t r;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(r) : "l"(from) : "memory");
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t r;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 8) {
    U32x2 r;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(from) : "memory");
    return bit_cast<T>(r);
  } else {
    static_assert(sizeof(T) == 16, "a load has 1, 2, 4, 8 or 16 bytes");
    U32x4 r;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(from)
                 : "memory");
    return bit_cast<T>(r);
  }
}

/// ld.global.nc (Data Movement): what no thread of the grid writes. The compiler may move, merge or drop it, and has
/// moved one ahead of the test that guarded it: what is not there in every case takes ld_global.
template <class T>
FOVEA_DEVICE T ld_global_nc(const T* from) {
  if constexpr (sizeof(T) == 1) {
    std::uint16_t r;
    asm("ld.global.nc.u8 %0, [%1];" : "=h"(r) : "l"(from));
    return bit_cast<T>(static_cast<std::uint8_t>(r));
  } else if constexpr (sizeof(T) == 2) {
    std::uint16_t r;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(from));
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t r;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(r) : "l"(from));
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 8) {
    U32x2 r;
    asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(from));
    return bit_cast<T>(r);
  } else {
    static_assert(sizeof(T) == 16, "a load has 1, 2, 4, 8 or 16 bytes");
    U32x4 r;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
        : "l"(from));
    return bit_cast<T>(r);
  }
}

/// st.global (Data Movement), 1, 2, 4, 8 or 16 bytes; `to` must be aligned to them.
template <class T>
FOVEA_DEVICE void st_global(T* to, const T& value) {
  if constexpr (sizeof(T) == 1) {
    const std::uint16_t v = bit_cast<std::uint8_t>(value);
    asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "h"(v) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(bit_cast<std::uint16_t>(value))
                 : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(bit_cast<std::uint32_t>(value))
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const U32x2 v = bit_cast<U32x2>(value);
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
  } else {
    static_assert(sizeof(T) == 16, "a store has 1, 2, 4, 8 or 16 bytes");
    const U32x4 v = bit_cast<U32x4>(value);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  }
}

/// st.global.L2::cache_hint (Data Movement; sm_80), 16 bytes.
FOVEA_DEVICE void st_global_cache_hint(F32x4* to, const F32x4& value, CachePolicy policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w),
               "l"(static_cast<std::uint64_t>(policy))
               : "memory");
}

/// ld.shared (Data Movement), 1, 2, 4, 8 or 16 bytes; `from` must be aligned to them.
template <class T>
FOVEA_DEVICE T ld_shared(SharedAddress from) {
  if constexpr (sizeof(T) == 1) {
    std::uint16_t r;
    asm volatile("ld.shared.u8 %0, [%1];" : "=h"(r) : "r"(from) : "memory");
    return bit_cast<T>(static_cast<std::uint8_t>(r));
  } else if constexpr (sizeof(T) == 2) {
    std::uint16_t r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(from) : "memory");
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(from) : "memory");
    return bit_cast<T>(r);
  } else if constexpr (sizeof(T) == 8) {
    U32x2 r;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(from) : "memory");
    return bit_cast<T>(r);
  } else {
    static_assert(sizeof(T) == 16, "a load has 1, 2, 4, 8 or 16 bytes");
    U32x4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(from)
                 : "memory");
    return bit_cast<T>(r);
  }
}

/// st.shared (Data Movement), 1, 2, 4, 8 or 16 bytes; `to` must be aligned to them.
template <class T>
FOVEA_DEVICE void st_shared(SharedAddress to, const T& value) {
  if constexpr (sizeof(T) == 1) {
    const std::uint16_t v = bit_cast<std::uint8_t>(value);
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "h"(v) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(bit_cast<std::uint16_t>(value))
                 : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bit_cast<std::uint32_t>(value))
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const U32x2 v = bit_cast<U32x2>(value);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
  } else {
    static_assert(sizeof(T) == 16, "a store has 1, 2, 4, 8 or 16 bytes");
    const U32x4 v = bit_cast<U32x4>(value);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
  }
}

/// atom.global.add.s32 (Synchronization), relaxed at device scope; gives what stood there before.
FOVEA_DEVICE std::int32_t atom_add_global(std::int32_t* to, std::int32_t value) {
  std::int32_t old;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(to), "r"(value)
               : "memory");
  return old;
}

/// atom.global.add.s32 (Synchronization), acquire and release at device scope: the last to arrive sees what the others
/// wrote before they arrived. Other threads of the CTA come in through a barrier before and after.
FOVEA_DEVICE std::int32_t atom_add_acq_rel_global(std::int32_t* to, std::int32_t value) {
  std::int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(to), "r"(value)
               : "memory");
  return old;
}

/// ld.acquire.gpu.global.s32 (Data Movement): what comes behind it sees what came before the release that wrote the
/// value.
FOVEA_DEVICE std::int32_t ld_acquire_global(const std::int32_t* from) {
  std::int32_t r;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(from) : "memory");
  return r;
}

/// red.release.gpu.global.add.s32 (Synchronization): everything that came before it, of this thread and of those that
/// it has synchronised with, is seen by whoever acquires the value. Waits for their additions to memory.
FOVEA_DEVICE void red_add_release_global(std::int32_t* to, std::int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// atom.shared.exch.b32 (Synchronization), relaxed at CTA scope; gives what stood there before.
FOVEA_DEVICE std::uint32_t atom_exch_shared(SharedAddress to, std::uint32_t value) {
  std::uint32_t old;
  asm volatile("atom.relaxed.cta.shared.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(to), "r"(value)
               : "memory");
  return old;
}

/// red.global.add.f32 (Synchronization), relaxed at device scope; the order of additions is not fixed. Four at once:
/// red.cuh.
FOVEA_DEVICE void red_add_global(float* to, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}

/// red.global.add.u64 (Synchronization), relaxed at device scope; of negative numbers the two's complement.
FOVEA_DEVICE void red_add_global(std::uint64_t* to, std::uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

/// red.global.or.b32 (Synchronization), relaxed at device scope.
FOVEA_DEVICE void red_or_global(std::uint32_t* to, std::uint32_t bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}

/// red.global.max.u32 (Synchronization), relaxed at device scope. Bits of floats from 0 on are in their order.
FOVEA_DEVICE void red_max_global(std::uint32_t* to, std::uint32_t value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// fence.acq_rel.gpu (Synchronization).
FOVEA_DEVICE void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// prefetch.global.L2 (Data Movement): the line at `from` is wanted soon.
FOVEA_DEVICE void prefetch_global_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

}  // namespace fovea::cuda::ptx
