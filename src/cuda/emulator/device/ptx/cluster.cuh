// The emulated twin of src/cuda/device/ptx/cluster.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace fovea::cuda::ptx {

FOVEA_DEVICE std::int32_t cluster_cta_rank() {
  return static_cast<std::int32_t>(emulator::cluster_rank());
}

FOVEA_DEVICE std::int32_t cluster_num_ctas() {
  return static_cast<std::int32_t>(emulator::cluster_size());
}

FOVEA_DEVICE void barrier_cluster_arrive(Site site = Site::here()) {
  emulator::cluster_arrive(true, {"barrier.cluster.arrive", site});
}

FOVEA_DEVICE void barrier_cluster_arrive_relaxed(Site site = Site::here()) {
  emulator::cluster_arrive(false, {"barrier.cluster.arrive.relaxed", site});
}

FOVEA_DEVICE void barrier_cluster_wait(Site site = Site::here()) {
  emulator::cluster_wait({"barrier.cluster.wait", site});
}

FOVEA_DEVICE SharedAddress mapa(SharedAddress address, std::int32_t rank) {
  return emulator::mapa(address, static_cast<std::uint32_t>(rank));
}

template <class T>
FOVEA_DEVICE T ld_shared_cluster(SharedAddress from, Site site = Site::here()) {
  static_assert(sizeof(T) == 4, "reads 4 bytes");
  T value;
  emulator::load_shared(from, &value, sizeof(T), {"ld.shared::cluster", site});
  return value;
}

template <class T>
FOVEA_DEVICE void st_shared_cluster(SharedAddress to, const T& value, Site site = Site::here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16, "writes 4 or 16 bytes");
  const Instruction what{"st.shared::cluster", site};
  emulator::check_registers(&value, sizeof(T), what);
  emulator::store_shared(to, &value, sizeof(T), what);
}

template <class T>
FOVEA_DEVICE void st_async(SharedAddress to, const T& value, SharedAddress barrier,
                           Site site = Site::here()) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "writes 4, 8 or 16 bytes");
  const Instruction what{"st.async", site};
  emulator::check_registers(&value, sizeof(T), what);
  emulator::st_async(to, &value, sizeof(T), barrier, what);
}

}  // namespace fovea::cuda::ptx
