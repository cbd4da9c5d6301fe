// Tiles of tensors of one to five dimensions between global and shared memory (TMA; Data Movement:
// cp.async.bulk.tensor; sm_90). A tensor map, encoded by the host, names the tensor, the box and the swizzle.
// Coordinates count elements, the first along the contiguous dimension; they may be negative or beyond the end: loads
// fill with zero and count those bytes too, stores drop them. The first coordinate must be a whole number of 16 bytes,
// and of a store not negative: hardware takes others for an illegal instruction (H200). A store knows the end of the
// contiguous dimension to 16 bytes only: it writes whole chunks. Rows of a box narrower than its swizzle lie a span
// apart in shared memory. One thread issues a copy. Shared addresses are multiples of 128 (of 1024, 512, 256 with a
// swizzle of 128, 64, 32 bytes). Shared memory that ordinary stores wrote needs fence_proxy_async_shared_cta and a
// barrier before a store. Groups are in bulk.cuh.
#pragma once

#include "ptx/bulk.cuh"

namespace fovea::cuda::ptx {

/// What cuTensorMapEncodeTiled writes. Passed as a __grid_constant__ parameter, or in global memory aligned to 64.
struct alignas(64) TensorMap {
  std::uint64_t opaque[16];
};

/// prefetch.tensormap: the map's 128 bytes are wanted soon.
FOVEA_DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// cp.async.bulk.tensor global to shared: complete_tx of the whole box on `barrier`, which must expect it.
template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_load(SharedAddress dst, const TensorMap* map,
                                            const std::int32_t (&coordinates)[rank],
                                            SharedAddress barrier, CachePolicy policy) {
  if constexpr (rank == 1) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(static_cast<std::uint64_t>(policy)), "r"(coordinates[0])
        : "memory");
  } else if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(static_cast<std::uint64_t>(policy)), "r"(coordinates[0]),
        "r"(coordinates[1])
        : "memory");
  } else if constexpr (rank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(static_cast<std::uint64_t>(policy)), "r"(coordinates[0]),
        "r"(coordinates[1]), "r"(coordinates[2])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(static_cast<std::uint64_t>(policy)), "r"(coordinates[0]),
        "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
        : "memory");
  } else {
    static_assert(rank == 5, "a tensor map has one to five dimensions");
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(dst),
        "l"(map), "r"(barrier), "l"(static_cast<std::uint64_t>(policy)), "r"(coordinates[0]),
        "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3]), "r"(coordinates[4])
        : "memory");
  }
}

/// cp.async.bulk.tensor with .multicast::cluster (fast on sm_90a): the box goes to the same offset of every CTA whose
/// rank is set in `cta_mask`, and counts on the barrier at the same offset there.
template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_load_multicast(SharedAddress dst, const TensorMap* map,
                                                      const std::int32_t (&coordinates)[rank],
                                                      SharedAddress barrier, std::uint16_t cta_mask,
                                                      CachePolicy policy) {
  if constexpr (rank == 1) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5}], [%2], %3, %4;" ::"r"(dst),
        "l"(map), "r"(barrier), "h"(cta_mask), "l"(static_cast<std::uint64_t>(policy)),
        "r"(coordinates[0])
        : "memory");
  } else if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(dst),
        "l"(map), "r"(barrier), "h"(cta_mask), "l"(static_cast<std::uint64_t>(policy)),
        "r"(coordinates[0]), "r"(coordinates[1])
        : "memory");
  } else if constexpr (rank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7}], [%2], %3, %4;" ::"r"(dst),
        "l"(map), "r"(barrier), "h"(cta_mask), "l"(static_cast<std::uint64_t>(policy)),
        "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(dst),
        "l"(map), "r"(barrier), "h"(cta_mask), "l"(static_cast<std::uint64_t>(policy)),
        "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
        : "memory");
  } else {
    static_assert(rank == 5, "a tensor map has one to five dimensions");
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;" ::"r"(
            dst),
        "l"(map), "r"(barrier), "h"(cta_mask), "l"(static_cast<std::uint64_t>(policy)),
        "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3]),
        "r"(coordinates[4])
        : "memory");
  }
}

/// cp.async.bulk.tensor shared to global, in the thread's current bulk group.
template <int rank>
FOVEA_DEVICE void cp_async_bulk_tensor_store(const TensorMap* map,
                                             const std::int32_t (&coordinates)[rank],
                                             SharedAddress src) {
  if constexpr (rank == 1) {
    asm volatile(
        "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];" ::"l"(map),
        "r"(src), "r"(coordinates[0])
        : "memory");
  } else if constexpr (rank == 2) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1])
        : "memory");
  } else if constexpr (rank == 3) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
        : "memory");
  } else {
    static_assert(rank == 5, "a tensor map has one to five dimensions");
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
            "l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]),
        "r"(coordinates[3]), "r"(coordinates[4])
        : "memory");
  }
}

/// cp.reduce.async.bulk.tensor add: global += shared in the type that the map names, in the thread's current bulk
/// group.
template <int rank>
FOVEA_DEVICE void cp_reduce_async_bulk_tensor_add(const TensorMap* map,
                                                  const std::int32_t (&coordinates)[rank],
                                                  SharedAddress src) {
  if constexpr (rank == 1) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.bulk_group [%0, {%2}], [%1];" ::"l"(
            map),
        "r"(src), "r"(coordinates[0])
        : "memory");
  } else if constexpr (rank == 2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::
            "l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1])
        : "memory");
  } else if constexpr (rank == 3) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], "
        "[%1];" ::"l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2])
        : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];" ::"l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
        : "memory");
  } else {
    static_assert(rank == 5, "a tensor map has one to five dimensions");
    asm volatile(
        "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, "
        "%6}], [%1];" ::"l"(map),
        "r"(src), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]),
        "r"(coordinates[3]), "r"(coordinates[4])
        : "memory");
  }
}

/// cp.async.bulk.prefetch.tensor: the box is wanted in L2 soon.
template <int rank>
FOVEA_DEVICE void cp_async_bulk_prefetch_tensor(const TensorMap* map,
                                                const std::int32_t (&coordinates)[rank]) {
  if constexpr (rank == 1) {
    asm volatile("cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%0, {%1}];" ::"l"(map),
                 "r"(coordinates[0])
                 : "memory");
  } else if constexpr (rank == 2) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(coordinates[0]), "r"(coordinates[1])
                 : "memory");
  } else if constexpr (rank == 3) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map),
                 "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2])
                 : "memory");
  } else if constexpr (rank == 4) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3])
        : "memory");
  } else {
    static_assert(rank == 5, "a tensor map has one to five dimensions");
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
        "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3]),
        "r"(coordinates[4])
        : "memory");
  }
}

}  // namespace fovea::cuda::ptx
