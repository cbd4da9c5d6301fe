// Which probabilities are dropped: Philox4x32-10 by position (Salmon et al. 2011), bit for bit as core/philox.hpp. The counter of a
// decision is (kv_idx / 4, q_idx, q_head, batch), its word kv_idx % 4, so one evaluation serves four neighbouring keys.
#pragma once

#include "ptx/base.cuh"
#include "ptx/memory.cuh"
#include "shared/forward_params.h"

namespace fovea::cuda {

FOVEA_DEVICE std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(a) * b) >> 32U);
}

/// The words of keys 4 group .. 4 group + 3.
FOVEA_DEVICE ptx::U32x4 random_words(const ForwardParams& p, std::int32_t batch,
                                     std::int32_t q_head, std::int32_t q_idx, std::int32_t group) {
  constexpr std::uint32_t kMultiplier0 = 0xD2511F53U, kMultiplier1 = 0xCD9E8D57U;
  constexpr std::uint32_t kWeyl0 = 0x9E3779B9U, kWeyl1 = 0xBB67AE85U;
  constexpr int kRounds = 10;
  ptx::U32x4 c{static_cast<std::uint32_t>(group), static_cast<std::uint32_t>(q_idx),
               static_cast<std::uint32_t>(q_head), static_cast<std::uint32_t>(batch)};
  std::uint32_t key0 = p.dropout_key[0], key1 = p.dropout_key[1];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    c = {high_product(kMultiplier1, c.z) ^ c.y ^ key0, kMultiplier1 * c.z,
         high_product(kMultiplier0, c.x) ^ c.w ^ key1, kMultiplier0 * c.x};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

FOVEA_DEVICE bool is_dropped(const ForwardParams& p, std::uint32_t word) {
  return word < p.dropout_threshold;
}

}  // namespace fovea::cuda
