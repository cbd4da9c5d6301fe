// What Hopper's tensor cores do at most: wgmma with operands that lie in shared memory, two warpgroups, nothing loaded
// or stored. See rates.cuh.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "rates/rates.cuh"
#include "tile/matrix_descriptor.cuh"

namespace fovea::cuda::rates {

inline constexpr int kRateRowBytes = kRateDepth * 2;  // swizzled as whole rows of 128 bytes

/// kRateDepth / 16 products m64n256k16 a warpgroup and round.
FOVEA_DEVICE void wgmma_rate(const RateParams& p) {
  const ptx::SharedAddress smem = ptx::dynamic_shared();
  const auto thread = static_cast<std::uint32_t>(ptx::thread_idx().x);
#pragma unroll 1
  for (std::uint32_t word = thread; word < kRateSharedBytes / 4; word += kRateThreads)
    ptx::st_shared(smem + word * 4, noise(word));
  ptx::fence_proxy_async_shared_cta();
  ptx::sync_threads();
  const auto operand = [](ptx::SharedAddress at) {
    return matrix_descriptor(at, 16, 8 * kRateRowBytes, Swizzle::bytes128);
  };
  const auto a = operand(smem + ptx::warp_idx() / 4 * 64 * kRateRowBytes);
  const auto b = operand(smem + kRateGroups * 64 * kRateRowBytes);
  float d[kRateCols / 2];
#pragma unroll
  for (int i = 0; i < kRateCols / 2; ++i) d[i] = 0;
#pragma unroll 1
  for (std::int32_t round = 0; round < p.rounds; ++round) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRateDepth / 16; ++step) {
      ptx::wgmma_ss<ptx::WgmmaType::bf16, ptx::WgmmaType::bf16, kRateCols>(
          d, advanced(a, 32 * step), advanced(b, 32 * step), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kRateCols / 2; ++i) sum += d[i];
  keep(p, sum);
}

}  // namespace fovea::cuda::rates
