// What this device does at most when nothing else has to be done: multiply-adds in registers, products of tensor cores
// whose operands are in place. The bounds that `fovea bench` names; tools/gpu_bound.cpp launches and counts.
//
// Operands are noise, since power depends on them: products of zeros run at clocks that no real product reaches.
#pragma once

#include "ptx/base.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "rates/rate_params.h"

namespace fovea::cuda::rates {

/// Bits of two bf16, between 1 and 2 in size, of either sign.
FOVEA_DEVICE std::uint32_t noise(std::uint32_t index) {
  const std::uint32_t mixed = (index * 2654435761U) ^ (index * 40503U >> 7U);
  return (mixed & 0x807f807fU) | 0x3f803f80U;
}

FOVEA_DEVICE void keep(const RateParams& p, float sum) {
  if (sum == 0.123456F) ptx::st_global(p.sink, sum);
}

/// kRateChains multiply-adds a thread and round, none of which waits for its neighbour.
FOVEA_DEVICE void fma_rate(const RateParams& p) {
  const auto seed = static_cast<float>(ptx::thread_idx().x) * 0.001F;
  float chain[kRateChains];
#pragma unroll
  for (int i = 0; i < kRateChains; ++i) chain[i] = seed + static_cast<float>(i);
#pragma unroll 4
  for (std::int32_t round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (float& each : chain) each = ptx::fma_rn(each, 0.999F, seed);
  }
  float sum = 0;
#pragma unroll
  for (const float each : chain) sum += each;
  keep(p, sum);
}

/// kRateRowBlocks x kRateColBlocks products of mma.m16n8k16 a warp and round.
FOVEA_DEVICE void mma_rate(const RateParams& p) {
  const auto lane = static_cast<std::uint32_t>(ptx::thread_idx().x);
  std::uint32_t a[kRateRowBlocks][4];
  std::uint32_t b[kRateColBlocks][2];
  float d[kRateRowBlocks][kRateColBlocks][4] = {};
#pragma unroll
  for (int i = 0; i < kRateRowBlocks * 4; ++i) a[i / 4][i % 4] = noise(lane * 64 + i);
#pragma unroll
  for (int i = 0; i < kRateColBlocks * 2; ++i) b[i / 2][i % 2] = noise(lane * 64 + 32 + i);
#pragma unroll 1
  for (std::int32_t round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (int row = 0; row < kRateRowBlocks; ++row) {
#pragma unroll
      for (int col = 0; col < kRateColBlocks; ++col)
        ptx::mma_m16n8k16<Element::bf16>(d[row][col], a[row], b[col][0], b[col][1]);
    }
  }
  float sum = 0;
#pragma unroll
  for (auto& row : d) {
#pragma unroll
    for (auto& block : row) sum += block[0] + block[1] + block[2] + block[3];
  }
  keep(p, sum);
}

}  // namespace fovea::cuda::rates
