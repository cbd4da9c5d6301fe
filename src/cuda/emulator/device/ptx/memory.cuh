// The emulated twin of src/cuda/device/ptx/memory.cuh.
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

template <class T>
inline constexpr bool kIsAccess = sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 ||
                                  sizeof(T) == 8 || sizeof(T) == 16;

template <class T>
FOVEA_DEVICE T ld_global(const T* from, Site site = Site::here()) {
  static_assert(kIsAccess<T>, "a load has 1, 2, 4, 8 or 16 bytes");
  T value;
  emulator::load_global(from, &value, sizeof(T), {"ld.global", site});
  return value;
}

template <class T>
FOVEA_DEVICE T ld_global_nc(const T* from, Site site = Site::here()) {
  static_assert(kIsAccess<T>, "a load has 1, 2, 4, 8 or 16 bytes");
  T value;
  emulator::load_global_nc(from, &value, sizeof(T), {"ld.global.nc", site});
  return value;
}

template <class T>
FOVEA_DEVICE void st_global(T* to, const T& value, Site site = Site::here()) {
  static_assert(kIsAccess<T>, "a store has 1, 2, 4, 8 or 16 bytes");
  emulator::check_registers(&value, sizeof(T), {"st.global", site});
  emulator::store_global(to, &value, sizeof(T), {"st.global", site});
}

FOVEA_DEVICE void st_global_cache_hint(F32x4* to, const F32x4& value, CachePolicy,
                                       Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"st.global", site});
  emulator::store_global(to, &value, sizeof value, {"st.global", site});
}

template <class T>
FOVEA_DEVICE T ld_shared(SharedAddress from, Site site = Site::here()) {
  static_assert(kIsAccess<T>, "a load has 1, 2, 4, 8 or 16 bytes");
  T value;
  emulator::load_shared(from, &value, sizeof(T), {"ld.shared", site});
  return value;
}

template <class T>
FOVEA_DEVICE void st_shared(SharedAddress to, const T& value, Site site = Site::here()) {
  static_assert(kIsAccess<T>, "a store has 1, 2, 4, 8 or 16 bytes");
  emulator::check_registers(&value, sizeof(T), {"st.shared", site});
  emulator::store_shared(to, &value, sizeof(T), {"st.shared", site});
}

FOVEA_DEVICE std::int32_t atom_add_global(std::int32_t* to, std::int32_t value,
                                          Site site = Site::here()) {
  return emulator::atomic_add(to, value, emulator::Order::relaxed, {"atom.relaxed", site});
}

FOVEA_DEVICE std::int32_t atom_add_acq_rel_global(std::int32_t* to, std::int32_t value,
                                                  Site site = Site::here()) {
  return emulator::atomic_add(to, value, emulator::Order::acq_rel, {"atom.acq_rel", site});
}

FOVEA_DEVICE std::int32_t ld_acquire_global(const std::int32_t* from, Site site = Site::here()) {
  return emulator::atomic_add(const_cast<std::int32_t*>(from), 0, emulator::Order::acq_rel,
                              {"ld.acquire", site});
}

FOVEA_DEVICE void red_add_release_global(std::int32_t* to, std::int32_t value,
                                         Site site = Site::here()) {
  emulator::atomic_add(to, value, emulator::Order::acq_rel, {"red.release", site});
}

FOVEA_DEVICE std::uint32_t atom_exch_shared(SharedAddress to, std::uint32_t value,
                                            Site site = Site::here()) {
  return emulator::exchange_shared(to, value, {"atom.shared.exch", site});
}

FOVEA_DEVICE void red_add_global(float* to, float value, Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"red.global", site});
  emulator::reduce_add(to, &value, 1, {"red.global", site});
}

FOVEA_DEVICE void red_add_global(std::uint64_t* to, std::uint64_t value, Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"red.global", site});
  emulator::reduce_add(to, value, {"red.global", site});
}

FOVEA_DEVICE void red_or_global(std::uint32_t* to, std::uint32_t bits, Site site = Site::here()) {
  emulator::check_registers(&bits, sizeof bits, {"red.global", site});
  emulator::reduce_or(to, bits, {"red.global", site});
}

FOVEA_DEVICE void red_max_global(std::uint32_t* to, std::uint32_t value, Site site = Site::here()) {
  emulator::check_registers(&value, sizeof value, {"red.global", site});
  emulator::reduce_max(to, value, {"red.global", site});
}

FOVEA_DEVICE void fence_acq_rel_gpu(Site site = Site::here()) {
  emulator::fence_acq_rel({"fence.acq_rel.gpu", site});
}

FOVEA_DEVICE void prefetch_global_l2(const void* from, Site site = Site::here()) {
  emulator::prefetch(from, {"prefetch.global.L2", site});
}

}  // namespace fovea::cuda::ptx
