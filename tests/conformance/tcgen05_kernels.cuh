// Small kernels that show what the tensor core of sm_100 does. Read tcgen05_cases.cpp for what must come of them.
#pragma once

#include "kernels.cuh"
#include "ptx/cluster.cuh"
#include "ptx/math_f32x2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05_ld_st.cuh"
#include "tile/tcgen05_descriptor.cuh"

namespace fovea::cuda::conformance {

inline constexpr int kTmemColumns = 512;
/// Behind the image of shared memory, from n[0] on: an mbarrier and the address of tensor memory.
inline constexpr int kTmemBytes = 16;

/// Everything before it, of both CTAs of a pair, comes before everything behind it.
template <int cta_group>
FOVEA_DEVICE void meet_all() {
  ptx::tcgen05_fence_before_thread_sync();
  if constexpr (cta_group == 2) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    ptx::sync_threads();
  }
  ptx::tcgen05_fence_after_thread_sync();
}

/// `ends`: an mbarrier for one arrival and a word, behind it.
template <int cta_group>
FOVEA_DEVICE ptx::TmemAddress take_tmem(ptx::SharedAddress ends) {
  if (ptx::thread_idx().x == 0) {
    ptx::mbarrier_init(ends, 1);
    ptx::fence_mbarrier_init_release_cluster();
  }
  meet_all<cta_group>();
  if (ptx::warp_idx() == 0) {
    ptx::tcgen05_alloc<kTmemColumns, cta_group>(ends + 8);
    ptx::tcgen05_relinquish_alloc_permit<cta_group>();
  }
  meet_all<cta_group>();
  return {ptx::ld_shared<std::uint32_t>(ends + 8)};
}

template <int cta_group>
FOVEA_DEVICE void give_tmem_back(ptx::TmemAddress tmem) {
  meet_all<cta_group>();
  if (ptx::warp_idx() == 0) ptx::tcgen05_dealloc<kTmemColumns, cta_group>(tmem);
}

FOVEA_DEVICE ptx::TmemAddress own_lanes(ptx::TmemAddress tmem) {
  return tmem.plus_lanes(32 * ptx::warp_idx());
}

/// [128 lanes][columns] words from global memory; columns are a multiple of 8.
FOVEA_DEVICE void fill_tmem(ptx::TmemAddress tmem, const std::uint32_t* from, int columns) {
  for (int c = 0; c < columns; c += 8) {
    std::uint32_t r[8];
    for (int i = 0; i < 8; ++i) r[i] = ptx::ld_global(from + ptx::thread_idx().x * columns + c + i);
    ptx::tcgen05_st_32x32b(own_lanes(tmem).plus_columns(c), r);
  }
  ptx::tcgen05_wait_st();
}

FOVEA_DEVICE void dump_tmem(std::uint32_t* to, ptx::TmemAddress tmem, int columns) {
  for (int c = 0; c < columns; c += 8) {
    std::uint32_t r[8];
    ptx::tcgen05_ld_32x32b(r, own_lanes(tmem).plus_columns(c));
    ptx::tcgen05_wait_ld(r);
    for (int i = 0; i < 8; ++i) ptx::st_global(to + ptx::thread_idx().x * columns + c + i, r[i]);
  }
}

enum class Move { l16x64b, l16x128b, l16x256b, l16x32bx2 };

/// in: [128][64] words of tensor memory. out: 16 registers of each thread, loaded from its warp's first lane and from
/// the 16th; then tensor memory after they were stored 32 columns on.
template <Move move>
FOVEA_DEVICE void tcgen05_moves(const Params& p) {
  const ptx::TmemAddress tmem = take_tmem<1>(ptx::dynamic_shared() + p.n[0]);
  fill_tmem(tmem, static_cast<const std::uint32_t*>(p.in), 64);
  meet_all<1>();
  auto* out = static_cast<std::uint32_t*>(p.out);
  for (int half = 0; half < 2; ++half) {
    std::uint32_t r[16];
    const ptx::TmemAddress from = own_lanes(tmem).plus_lanes(16 * half), to = from.plus_columns(32);
    if constexpr (move == Move::l16x64b) {
      ptx::tcgen05_ld_16x64b(r, from);
      ptx::tcgen05_wait_ld(r);
      ptx::tcgen05_st_16x64b(to, r);
    } else if constexpr (move == Move::l16x128b) {
      ptx::tcgen05_ld_16x128b(r, from);
      ptx::tcgen05_wait_ld(r);
      ptx::tcgen05_st_16x128b(to, r);
    } else if constexpr (move == Move::l16x256b) {
      ptx::tcgen05_ld_16x256b(r, from);
      ptx::tcgen05_wait_ld(r);
      ptx::tcgen05_st_16x256b(to, r);
    } else {
      ptx::tcgen05_ld_16x32bx2<16>(r, from);
      ptx::tcgen05_wait_ld(r);
      ptx::tcgen05_st_16x32bx2<16>(to, r);
    }
    ptx::tcgen05_wait_st();
    for (int i = 0; i < 16; ++i)
      ptx::st_global(out + (half * num_threads() + ptx::thread_idx().x) * 16 + i, r[i]);
  }
  meet_all<1>();
  dump_tmem(out + 2 * 16 * 128, tmem, 64);
  give_tmem_back<1>(tmem);
}

/// in: an image of n[0] bytes, a[0] its descriptor. out: [128][8] words, ones where nothing was copied to.
template <ptx::TmemCopy shape>
FOVEA_DEVICE void tcgen05_copy(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared();
  fill_shared(base, p.in, p.n[0]);
  ptx::fence_proxy_async_shared_cta();
  const ptx::TmemAddress tmem = take_tmem<1>(base + p.n[0]);
  std::uint32_t ones[8];
  for (std::uint32_t& word : ones) word = 1;
  ptx::tcgen05_st_32x32b(own_lanes(tmem), ones);
  ptx::tcgen05_wait_st();
  meet_all<1>();
  if (ptx::warp_idx() == 0 && ptx::elect_one()) {
    ptx::tcgen05_cp<shape>(
        tmem, advanced(ptx::SmemDescriptor{p.a[0]}, static_cast<int>(base & 0x3FFFFU)));
    ptx::tcgen05_commit(base + p.n[0]);
  }
  ptx::sync_warp();
  ptx::mbarrier_wait_parity(base + p.n[0], 0);
  ptx::tcgen05_fence_after_thread_sync();
  dump_tmem(static_cast<std::uint32_t*>(p.out), tmem, 8);
  give_tmem_back<1>(tmem);
}

/// What a product kernel's n holds.
enum ProductField { kImageBytes, kInstruction, kColumnsOfD, kScaleOffset, kSecondInstruction };

// Columns of tensor memory: d, then a of two steps, or scales of a and of b.
inline constexpr int kColumnsBehindD = 256;

FOVEA_DEVICE constexpr bool has_scales(ptx::Tcgen05Kind) { return false; }
FOVEA_DEVICE constexpr bool has_scales(ptx::Tcgen05ScaledKind) { return true; }

template <auto kind, int cta_group, bool is_ts>
FOVEA_DEVICE void issue_step(const Params& p, ptx::TmemAddress tmem, int step) {
  const int offset = static_cast<int>(ptx::dynamic_shared() & 0x3FFFFU);
  const ptx::SmemDescriptor a = advanced(ptx::SmemDescriptor{p.a[step]}, offset),
                            b = advanced(ptx::SmemDescriptor{p.b[step]}, offset);
  const ptx::TmemAddress behind = tmem.plus_columns(kColumnsBehindD);
  const auto bits = static_cast<std::uint32_t>(p.n[step == 0 ? kInstruction : kSecondInstruction]);
  if constexpr (has_scales(kind)) {
    ptx::tcgen05_mma_scaled_ss<kind, cta_group>(tmem, a, b, {bits}, behind, behind.plus_columns(4),
                                                step > 0);
  } else if constexpr (is_ts) {
    ptx::tcgen05_mma_ts<kind, cta_group>(tmem, behind.plus_columns(8 * step), b, {bits}, step > 0);
  } else {
    ptx::tcgen05_mma_ss<kind, cta_group>(tmem, a, b, {bits}, step > 0);
  }
}

/// d = a b, then d += a b of the next step of depth. in, for each CTA: the image of shared memory; for a in tensor
/// memory its [128][16] words. out, for each CTA: [128][n[kColumnsOfD]] words, zeros where no product writes.
template <auto kind, int cta_group, bool is_ts>
FOVEA_DEVICE void tcgen05_product(const Params& p) {
  const ptx::SharedAddress base = ptx::dynamic_shared(), done = base + p.n[kImageBytes];
  const int rank = cta_group == 2 ? ptx::cluster_cta_rank() : 0, columns = p.n[kColumnsOfD];
  const auto* in =
      static_cast<const char*>(p.in) + rank * (p.n[kImageBytes] + (is_ts ? 128 * 16 * 4 : 0));
  fill_shared(base, in, p.n[kImageBytes]);
  ptx::fence_proxy_async_shared_cta();
  const ptx::TmemAddress tmem = take_tmem<cta_group>(done);
  for (int c = 0; c < columns; c += 8) {
    const std::uint32_t zeros[8] = {};
    ptx::tcgen05_st_32x32b(own_lanes(tmem).plus_columns(c), zeros);
  }
  ptx::tcgen05_wait_st();
  if constexpr (is_ts) {
    fill_tmem(tmem.plus_columns(kColumnsBehindD),
              reinterpret_cast<const std::uint32_t*>(in + p.n[kImageBytes]), 16);
  }
  meet_all<cta_group>();
  if (rank == 0 && ptx::warp_idx() == 0 && ptx::elect_one()) {
    if constexpr (has_scales(kind)) {
      for (int i = 0; i < 2; ++i) {
        const ptx::SharedAddress scales = base + p.n[kScaleOffset] + 512 * i;
        ptx::tcgen05_cp<ptx::TmemCopy::rows32x128b_warpx4, cta_group>(
            tmem.plus_columns(kColumnsBehindD + 4 * i),
            smem_descriptor(matrix_descriptor(scales, 16, 128, Swizzle::none)));
      }
    }
    issue_step<kind, cta_group, is_ts>(p, tmem, 0);
    issue_step<kind, cta_group, is_ts>(p, tmem, 1);
    if constexpr (cta_group == 2) {
      ptx::tcgen05_commit_multicast<2>(done, 3);
    } else {
      ptx::tcgen05_commit(done);
    }
  }
  ptx::sync_warp();
  ptx::mbarrier_wait_parity(done, 0);
  ptx::tcgen05_fence_after_thread_sync();
  dump_tmem(static_cast<std::uint32_t*>(p.out) + rank * 128 * columns, tmem, columns);
  give_tmem_back<cta_group>(tmem);
}

inline constexpr int kNumOfPairs = 3;

/// Of two floats at once: the thread's words a, b, c in the first place and b, c, a in the second. in: per thread 3
/// words. out: 2 kNumOfPairs words, those of an operation side by side.
FOVEA_DEVICE void f32x2(const Params& p) {
  const int i = ptx::block_idx().x * num_threads() + ptx::thread_idx().x;
  const auto* in = static_cast<const float*>(p.in) + 3 * i;
  const float a = ptx::ld_global(in), b = ptx::ld_global(in + 1), c = ptx::ld_global(in + 2);
  const ptx::F32x2 results[kNumOfPairs] = {ptx::fma_rn_ftz_f32x2({a, b}, {b, c}, {c, a}),
                                           ptx::add_rn_f32x2({a, b}, {b, c}),
                                           ptx::mul_rn_f32x2({a, b}, {b, c})};
  auto* out = static_cast<ptx::F32x2*>(p.out) + kNumOfPairs * i;
  for (int k = 0; k < kNumOfPairs; ++k) ptx::st_global(out + k, results[k]);
}

}  // namespace fovea::cuda::conformance
