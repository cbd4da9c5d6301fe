// One product of the tensor core of sm_100 at a time: operands go to shared memory by ordinary stores, scales to tensor
// memory by tcgen05.cp, d comes back by tcgen05.ld; alone or in a pair of CTAs. And the mistakes that belong to pairs,
// scales and masked lanes. Depth is two steps of 32 bytes, K-major, swizzle of 64 bytes.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "ptx/warp.cuh"
#include "tile/shared_tile.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::guest100_product {

enum class Planted {
  nothing,
  // pairs
  alloc_before_the_peer_runs,
  issued_by_both_ctas,
  commit_without_multicast,
  commit_to_the_wrong_rank,
  commit_of_nothing,
  peer_leaves_early,
  operands_of_one_cta,
  issued_by_two_warps,
  // scales
  scales_by_another_quarter,
  scale_byte_wrong,
  scale_with_sign,
  copy_over_scales_in_flight,
  copy_over_a_copy,
  copy_of_unfenced_scales,
  // masked lanes
  masked_lane_read,
};

struct Params {
  // each CTA's rows of a, columns of b: 64 bytes; scales as tcgen05.cp takes them, 512 bytes each
  const ptx::U32x4 *a, *b, *a_scales, *b_scales;
  std::uint32_t* d;  // [CTA][128 lanes][columns] words
};

inline constexpr int kThreads = 128, kDepthBytes = 64;

/// d's columns in a CTA; a pair of 64 rows each has half of them in each half of its lanes.
template <int m, int n, int cta_group>
inline constexpr int kColumnsOf = cta_group == 2 && m == 128 ? n / 2 : n;

template <int rows>
using Tile = SharedTile<rows, kDepthBytes, Swizzle::bytes64>;

/// How to issue one step; `scales` columns begin where d ends.
template <ptx::Tcgen05ScaledKind kind, ScaledTensorProduct step0, ScaledTensorProduct step1>
struct Scaled {
  static constexpr int kM = step0.m, kN = step0.n, kGroup = step0.cta_group;
  static constexpr bool kHasScales = true;

  FOVEA_DEVICE_MEMBER static void issue(int step, ptx::TmemAddress d, ptx::SmemDescriptor a,
                                        ptx::SmemDescriptor b, ptx::TmemAddress a_scales,
                                        ptx::TmemAddress b_scales, bool is_wrong_byte) {
    ptx::ScaledInstructionDescriptor instruction =
        step == 0 ? scaled_instruction_descriptor<step0>() : scaled_instruction_descriptor<step1>();
    if (is_wrong_byte) instruction.bits ^= 2U << 29;
    ptx::tcgen05_mma_scaled_ss<kind, kGroup>(d, a, b, instruction, a_scales, b_scales, step > 0);
  }
};

template <TensorProduct product>
struct Plain {
  static constexpr int kM = product.m, kN = product.n, kGroup = product.cta_group;
  static constexpr bool kHasScales = false;

  FOVEA_DEVICE_MEMBER static void issue(int step, ptx::TmemAddress d, ptx::SmemDescriptor a,
                                        ptx::SmemDescriptor b, ptx::TmemAddress, ptx::TmemAddress,
                                        bool) {
    ptx::tcgen05_mma_ss<tcgen05_kind(product.a), kGroup>(d, a, b, instruction_descriptor<product>(),
                                                         step > 0);
  }
};

/// Lanes 3 and 64 of d are not written.
template <TensorProduct product>
struct Masked {
  static constexpr int kM = product.m, kN = product.n, kGroup = product.cta_group;
  static constexpr bool kHasScales = false;

  FOVEA_DEVICE_MEMBER static void issue(int step, ptx::TmemAddress d, ptx::SmemDescriptor a,
                                        ptx::SmemDescriptor b, ptx::TmemAddress, ptx::TmemAddress,
                                        bool) {
    std::uint32_t off[4 * kGroup] = {};
    off[0] = 1U << 3;
    off[2] = 1U;
    ptx::tcgen05_mma_ss_masked<tcgen05_kind(product.a), kGroup>(
        d, a, b, instruction_descriptor<product>(), off, step > 0);
  }
};

template <class Product, Planted planted>
struct Kernel {
  static constexpr int kGroup = Product::kGroup, kRows = Product::kM / kGroup,
                       kColumns = Product::kN / kGroup,
                       kDColumns = kColumnsOf<Product::kM, Product::kN, kGroup>;
  static constexpr int kA = 0, kB = kA + Tile<kRows>::kBytes,
                       kScales = kB + (Tile<kColumns>::kBytes + 1023) / 1024 * 1024,
                       kDone = kScales + 2048, kTmem = kDone + 16, kSharedBytes = kTmem + 16;
  static constexpr int kTmemColumns = 256;

  const Params& p;
  ptx::SharedAddress smem = ptx::dynamic_shared();
  int warp = ptx::warp_idx(), lane = ptx::lane_idx(),
      rank = kGroup == 2 ? ptx::cluster_cta_rank() : 0;

  static constexpr bool is(Planted other) { return planted == other; }
  int thread() const { return 32 * warp + lane; }

  template <class OneTile>
  void fill(OneTile tile, const ptx::U32x4* from) const {
    constexpr int kChunks = OneTile::kRows * OneTile::kChunks;
    for (int i = thread(); i < kChunks; i += kThreads) {
      ptx::st_shared(tile.chunk(i / OneTile::kChunks, i % OneTile::kChunks),
                     ptx::ld_global(from + rank * kChunks + i));
    }
  }

  void fill_operands() const {
    if (!is(Planted::operands_of_one_cta) || rank == 0) {
      fill(Tile<kRows>{smem + kA}, p.a);
      fill(Tile<kColumns>{smem + kB}, p.b);
    }
    if constexpr (Product::kHasScales) {
      for (int i = thread(); i < 64; i += kThreads) {
        ptx::st_shared(smem + kScales + 16 * i,
                       ptx::ld_global((i < 32 ? p.a_scales : p.b_scales) + 32 * rank + i % 32));
        // What a later step of a kernel would multiply by.
        ptx::st_shared(smem + kScales + 1024 + 16 * i, ptx::U32x4{0, 0, 0, 0});
      }
    }
    if (!is(Planted::copy_of_unfenced_scales)) ptx::fence_proxy_async_shared_cta();
  }

  void sync_all() const {
    ptx::tcgen05_fence_before_thread_sync();
    if constexpr (kGroup == 2) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    } else {
      ptx::sync_threads();
    }
    ptx::tcgen05_fence_after_thread_sync();
  }

  ptx::SmemDescriptor scales(int which) const {
    return smem_descriptor(matrix_descriptor(smem + kScales + 512 * which, 16, 128, Swizzle::none));
  }

  template <class OneTile>
  ptx::SmemDescriptor operand(OneTile tile, int step) const {
    return advanced(smem_descriptor(k_major_descriptor(tile)), k_major_offset<OneTile>(step));
  }

  static constexpr ptx::TmemCopy kScaleCopy = is(Planted::scales_by_another_quarter)
                                                  ? ptx::TmemCopy::rows64x128b_warpx2_02_13
                                                  : ptx::TmemCopy::rows32x128b_warpx4;

  void copy_scales(ptx::TmemAddress a_scales, ptx::TmemAddress b_scales) const {
    if constexpr (Product::kHasScales) {
      ptx::tcgen05_cp<kScaleCopy, kGroup>(a_scales, scales(0));
      if (is(Planted::copy_over_a_copy)) ptx::tcgen05_cp<kScaleCopy, kGroup>(a_scales, scales(0));
      ptx::tcgen05_cp<kScaleCopy, kGroup>(b_scales, scales(1));
    }
  }

  void issue(ptx::TmemAddress d) const {
    const ptx::TmemAddress a_scales = d.plus_columns(kDColumns),
                           b_scales = a_scales.plus_columns(4);
    copy_scales(a_scales, b_scales);
    for (int step = 0; step < 2; ++step) {
      Product::issue(step, d, operand(Tile<kRows>{smem + kA}, step),
                     operand(Tile<kColumns>{smem + kB}, step), a_scales, b_scales,
                     is(Planted::scale_byte_wrong));
    }
    if (is(Planted::copy_over_scales_in_flight))
      ptx::tcgen05_cp<kScaleCopy, kGroup>(a_scales, scales(2));
    commit();
  }

  void commit() const {
    if constexpr (kGroup == 1) {
      ptx::tcgen05_commit(smem + kDone);
    } else if (is(Planted::commit_without_multicast)) {
      ptx::tcgen05_commit<2>(smem + kDone);
    } else {
      ptx::tcgen05_commit_multicast<2>(smem + kDone, is(Planted::commit_to_the_wrong_rank) ? 1 : 3);
      if (is(Planted::commit_of_nothing)) ptx::tcgen05_commit_multicast<2>(smem + kDone + 8, 3);
    }
  }

  void write_d(ptx::TmemAddress d) const {
    std::uint32_t words[kDColumns];
    ptx::tcgen05_ld_32x32b(words, d.plus_lanes(32 * warp));
    ptx::tcgen05_wait_ld(words);
    for (int j = 0; j < kDColumns; ++j)
      ptx::st_global(p.d + (rank * 128 + thread()) * kDColumns + j, words[j]);
  }

  /// A lane that no product writes must hold something, or not be read.
  void clear_d(ptx::TmemAddress d) const {
    if (is(Planted::masked_lane_read)) return;
    const std::uint32_t zeros[kDColumns] = {};
    ptx::tcgen05_st_32x32b(d.plus_lanes(32 * warp), zeros);
    ptx::tcgen05_wait_st();
  }

  void run() const {
    if (thread() == 0) {
      ptx::mbarrier_init(smem + kDone, 1);
      ptx::mbarrier_init(smem + kDone + 8, 1);
      ptx::fence_mbarrier_init_release_cluster();
    }
    fill_operands();
    if (!is(Planted::alloc_before_the_peer_runs)) sync_all();
    if (warp == 0) {
      ptx::tcgen05_alloc<kTmemColumns, kGroup>(smem + kTmem);
      ptx::tcgen05_relinquish_alloc_permit<kGroup>();
    }
    sync_all();
    const ptx::TmemAddress d{ptx::ld_shared<std::uint32_t>(smem + kTmem)};
    clear_d(d);
    sync_all();
    const bool is_issuer = warp == 0 || (is(Planted::issued_by_two_warps) && warp == 1);
    const bool is_issuing_cta = rank == 0 || is(Planted::issued_by_both_ctas);
    if (is_issuer && is_issuing_cta && ptx::elect_one()) issue(d);
    ptx::sync_warp();
    if (is(Planted::peer_leaves_early) && rank == 1) {
      ptx::sync_threads();
      if (warp == 0) ptx::tcgen05_dealloc<kTmemColumns, kGroup>(d);
      return;
    }
    ptx::mbarrier_wait_parity(smem + kDone, 0);
    ptx::tcgen05_fence_after_thread_sync();
    write_d(d);
    sync_all();
    if (warp == 0) ptx::tcgen05_dealloc<kTmemColumns, kGroup>(d);
  }
};

template <class Product, Planted planted = Planted::nothing>
FOVEA_DEVICE void product(const Params& p) {
  Kernel<Product, planted>{p}.run();
}

}  // namespace fovea::cuda::guest100_product
