// Conformance kernels of TMA, bulk copies and clusters. Read kernels.cuh first.
#pragma once

#include "kernels.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/red.cuh"
#include "ptx/tma.cuh"

namespace fovea::cuda::conformance {

FOVEA_DEVICE const ptx::TensorMap* map_of(const Params& p) {
  return reinterpret_cast<const ptx::TensorMap*>(p.map);
}

/// The barrier of a kernel whose image has `bytes` bytes; complete for nobody yet.
FOVEA_DEVICE ptx::SharedAddress start_barrier(ptx::SharedAddress base, int bytes, int count) {
  const ptx::SharedAddress barrier = base + bytes;
  if (ptx::thread_idx().x == 0) {
    ptx::mbarrier_init(barrier, count);
    ptx::fence_mbarrier_init_release_cluster();
  }
  ptx::sync_threads();
  return barrier;
}

/// n: bytes of the image, bytes of the box, offset of the box in shared memory, then coordinates. in is the tensor or,
/// where the map names out, not read; the image before comes from fill(). out: the image.
template <int rank>
FOVEA_DEVICE void tma_load(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  for (int i = ptx::thread_idx().x; i < p.n[0] / 4; i += num_threads())
    ptx::st_shared(base + 4 * i, 0xEEEEEEEEU);
  ptx::fence_proxy_async_shared_cta();
  const ptx::SharedAddress barrier = start_barrier(base, p.n[0], 1);
  if (ptx::thread_idx().x == 0) {
    std::int32_t coordinates[rank];
    for (int i = 0; i < rank; ++i) coordinates[i] = p.n[3 + i];
    ptx::prefetch_tensormap(map_of(p));
    ptx::mbarrier_arrive_expect_tx(barrier, p.n[1]);
    ptx::cp_async_bulk_tensor_load(base + p.n[2], map_of(p), coordinates, barrier,
                                   ptx::CachePolicy::evict_normal);
  }
  ptx::mbarrier_wait_parity(barrier, 0);
  dump_shared(p.out, base, p.n[0]);
}

/// As tma_load; in: the image. The map names a tensor in out.
template <int rank, bool is_reduction>
FOVEA_DEVICE void tma_store(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  fill_shared(base, p.in, p.n[0]);
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();
  if (ptx::thread_idx().x == 0) {
    std::int32_t coordinates[rank];
    for (int i = 0; i < rank; ++i) coordinates[i] = p.n[3 + i];
    if constexpr (is_reduction) {
      ptx::cp_reduce_async_bulk_tensor_add(map_of(p), coordinates, base + p.n[2]);
    } else {
      ptx::cp_async_bulk_tensor_store(map_of(p), coordinates, base + p.n[2]);
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

/// in: 4096 bytes. out: 4096 bytes through shared memory by bulk load and store, then 1024 floats to which the same
/// bytes are added.
FOVEA_DEVICE void bulk_copies(const Params& p) {
  constexpr int kBytes = 4096;
  const ptx::SharedAddress base = ptx::dynamic_shared();
  const ptx::SharedAddress barrier = start_barrier(base, kBytes, 1);
  if (ptx::thread_idx().x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, kBytes);
    ptx::cp_async_bulk_load(base, p.in, 1024, barrier, ptx::CachePolicy::evict_first);
    ptx::cp_async_bulk_load(base + 1024, static_cast<const char*>(p.in) + 1024, kBytes - 1024,
                            barrier, ptx::CachePolicy::evict_last);
    ptx::mbarrier_wait_parity(barrier, 0);
    ptx::cp_async_bulk_store(p.out, base, kBytes);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_reduce_async_bulk_add_f32(static_cast<float*>(p.out) + 1024, base, kBytes);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<1>();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

/// Two CTAs. Each sends to the other: 2048 bytes of shared memory by a bulk copy, thread t's 16 bytes at 2048 + 16 t by
/// st.async, and a word per thread by st.shared::cluster; then reads the word back. in: 4096 bytes, 2048 for each CTA.
/// out: the image of each CTA, 8192 bytes, and the words read back.
FOVEA_DEVICE void cluster_copies(const Params& p) {
  constexpr int kImage = 8192, kSent = 4096, kBulk = 2048;
  const ptx::SharedAddress base = ptx::dynamic_shared();
  const int rank = ptx::cluster_cta_rank(), thread = ptx::thread_idx().x;
  for (int i = thread; i < kImage / 4; i += num_threads())
    ptx::st_shared(base + 4 * i, 0xEEEEEEEEU);
  ptx::sync_threads();
  const ptx::SharedAddress source = base + kSent;
  fill_shared(source, static_cast<const char*>(p.in) + kBulk * rank, kBulk);
  ptx::fence_proxy_async_shared_cta();
  const ptx::SharedAddress barrier = start_barrier(base, kImage, 1);
  if (thread == 0) ptx::mbarrier_arrive_expect_tx(barrier, kBulk + 16 * num_threads());
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  const int other = 1 - rank;
  const ptx::SharedAddress their_barrier = ptx::mapa(barrier, other);
  if (thread == 0)
    ptx::cp_async_bulk_shared_to_cluster(ptx::mapa(base, other), source, kBulk, their_barrier);
  const std::uint32_t word = 1000U * rank + thread;
  ptx::st_async(ptx::mapa(base + kBulk + 16 * thread, other),
                ptx::U32x4{word, word + 1, word + 2, word + 3}, their_barrier);
  ptx::mbarrier_wait_parity_acquire_cluster(barrier, 0);

  const ptx::SharedAddress theirs = ptx::mapa(base + 7168 + 4 * thread, other);
  ptx::st_shared_cluster(theirs, word + 7);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  auto* out = static_cast<std::uint32_t*>(p.out);
  ptx::st_global(out + 2 * kImage / 4 + num_threads() * rank + thread,
                 ptx::ld_shared_cluster<std::uint32_t>(theirs));
  dump_shared(out + rank * kImage / 4, base, kImage);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

/// Two CTAs; each loads one half of the box to both. n and map as tma_load<2>; the second CTA's box begins n[5]
/// elements further along the second dimension and n[1] bytes further in shared memory. out: the image of each CTA.
FOVEA_DEVICE void tma_multicast(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  const int rank = ptx::cluster_cta_rank();
  for (int i = ptx::thread_idx().x; i < p.n[0] / 4; i += num_threads())
    ptx::st_shared(base + 4 * i, 0xEEEEEEEEU);
  ptx::fence_proxy_async_shared_cta();
  const ptx::SharedAddress barrier = start_barrier(base, p.n[0], 1);
  if (ptx::thread_idx().x == 0) ptx::mbarrier_arrive_expect_tx(barrier, 2 * p.n[1]);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (ptx::thread_idx().x == 0) {
    const std::int32_t coordinates[2] = {p.n[3], p.n[4] + rank * p.n[5]};
    ptx::cp_async_bulk_tensor_load_multicast(base + p.n[2] + rank * p.n[1], map_of(p), coordinates,
                                             barrier, 3, ptx::CachePolicy::evict_normal);
  }
  ptx::mbarrier_wait_parity(barrier, 0);
  dump_shared(static_cast<char*>(p.out) + rank * p.n[0], base, p.n[0]);
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

}  // namespace fovea::cuda::conformance
