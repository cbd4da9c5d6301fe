// The emulated twin of src/cuda/device/ptx/tma.cuh. Its tensor maps come from emulator/tensor_map.hpp.
#pragma once

#include "ptx/bulk.cuh"

namespace fovea::cuda::ptx {

struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

FOVEA_DEVICE void prefetch_tensormap(const TensorMap* map, Site site = Site::here()) {
  emulator::check_tensor_map(map, {"prefetch.tensormap", site});
}

template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_load(SharedAddress dst, const TensorMap* map,
                                            const std::int32_t (&coordinates)[rank],
                                            SharedAddress barrier, CachePolicy,
                                            Site site = Site::here()) {
  emulator::tma_load(dst, map, coordinates, barrier, 0, {"cp.async.bulk.tensor", site});
}

template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_load_multicast(SharedAddress dst, const TensorMap* map,
                                                      const std::int32_t (&coordinates)[rank],
                                                      SharedAddress barrier, std::uint16_t cta_mask,
                                                      CachePolicy, Site site = Site::here()) {
  emulator::tma_load(dst, map, coordinates, barrier, cta_mask,
                     {"cp.async.bulk.tensor.multicast", site});
}

template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_store(const TensorMap* map,
                                             const std::int32_t (&coordinates)[rank],
                                             SharedAddress src, Site site = Site::here()) {
  emulator::tma_store(map, coordinates, src, false, {"cp.async.bulk.tensor.global", site});
}

template <int rank>
FOVEA_DEVICE void cp_reduce_async_bulk_tensor_add(const TensorMap* map,
                                                  const std::int32_t (&coordinates)[rank],
                                                  SharedAddress src, Site site = Site::here()) {
  emulator::tma_store(map, coordinates, src, true, {"cp.reduce.async.bulk.tensor", site});
}

template <int rank>
FOVEA_DEVICE void cp_async_bulk_prefetch_tensor(const TensorMap* map, const std::int32_t (&)[rank],
                                                Site site = Site::here()) {
  emulator::check_tensor_map(map, {"cp.async.bulk.prefetch.tensor", site});
}

}  // namespace fovea::cuda::ptx
