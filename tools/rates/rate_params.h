// What kernels that measure rates take, and what a CTA of each does in a round: rates.cuh, wgmma_rate.cuh. Read by
// NVRTC and by tools/gpu_bound.cpp, which launches and counts.
#pragma once

#include "shared/types.h"

namespace fovea::cuda::rates {

struct RateParams {
  float* sink;  // written where a sum is a number that it never is
  std::int32_t rounds;
};

inline constexpr int kRateThreads = 256;

/// Chains of multiply-adds of a thread.
inline constexpr int kRateChains = 16;

/// Products of mma.m16n8k16 of a warp.
inline constexpr int kRateRowBlocks = 2, kRateColBlocks = 8;

/// A product of 64 x kRateCols x kRateDepth of each warpgroup.
inline constexpr int kRateGroups = kRateThreads / 128, kRateCols = 256, kRateDepth = 64;
/// A of each warpgroup, then B, which they share: rows of 128 bytes.
inline constexpr int kRateSharedBytes = (64 * kRateGroups + kRateCols) * kRateDepth * 2;

}  // namespace fovea::cuda::rates
