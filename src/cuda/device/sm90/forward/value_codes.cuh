// Tiles of values that are codes, in shared memory: rows of ones below them, and what a pass over a row tile that is
// computed again makes of them. Read value_sums.cuh for the product.
#pragma once

#include "common/cache_tiles.cuh"
#include "common/passes.cuh"
#include "common/value_codes.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "shared/quantize_v.h"
#include "sm90/forward/cta.cuh"

namespace fovea::cuda::sm90 {

/// Once, by all threads of the CTA, which meet before the first product.
template <Sm90ForwardSpec spec>
FOVEA_DEVICE void write_rows_of_ones(const Cta<spec>& cta) {
  using T = Traits<spec>;
  constexpr std::uint32_t kOnes = kOneCode * 0x01010101U;
  constexpr int kChunks = kRowsOfOnes * T::VTile::kChunks;
#pragma unroll 1
  for (int at = 32 * cta.warp + cta.lane; at < T::kStages * kChunks; at += 32 * spec.num_warps) {
    const typename T::VTile values{cta.v_at(at / kChunks)};
    const int row = spec.head_dim_v + at % kChunks / T::VTile::kChunks;
    ptx::st_shared(values.chunk(row, at % T::VTile::kChunks),
                   ptx::U32x4{kOnes, kOnes, kOnes, kOnes});
  }
  ptx::fence_proxy_async_shared_cta();
}

/// The bits of the element that a code stands for.
template <Sm90ForwardSpec spec>
FOVEA_DEVICE std::uint32_t given_value(const Cta<spec>& cta, const KvRows& kv, int channel,
                                       int byte) {
  const BshdParam& v = cta.p.common.v;
  if constexpr (Traits<spec>::kHasRoundedCache) {
    Sequence sequence{};
    sequence.kv_batch = kv.batch;
    sequence.kv_row = kv.first_row;
    const std::int32_t key = kv.idx * spec.tile_kv + key_of_byte(byte);
    return CacheRow<spec.element, spec.v_codes>::of(v, cta.p.v_scale,
                                                    place_of_key<spec>(cta.p.common, sequence, key),
                                                    kv.sequence, kv.kv_head)
        .bits(channel);
  }
  const std::int64_t row = kv.first_row + kv.idx * spec.tile_kv + key_of_byte(byte);
  return ptx::ld_global(static_cast<const std::uint16_t*>(v.data) + kv.batch * v.batch_stride +
                        row * v.row_stride + kv.kv_head * v.head_stride + channel);
}

/// Of a tile that has arrived, by one warp.
template <Sm90ForwardSpec spec>
FOVEA_DEVICE void rewrite_value_codes(const Cta<spec>& cta,
                                      const typename Traits<spec>::VTile& values, const KvRows& kv,
                                      Pass pass) {
  constexpr int kWords = spec.tile_kv / 4;  // of a row
  if (pass == Pass::low) pass = Pass::finite;
#pragma unroll 1
  for (int at = cta.lane; at < spec.head_dim_v * kWords; at += 32) {
    const int channel = at / kWords;
    const int byte = at % kWords * 4;
    const SharedAddress word = values.at(channel, byte);
    const auto codes = ptx::ld_shared<std::uint32_t>(word);
    const auto given = [&](int i) { return given_value(cta, kv, channel, byte + i); };
    ptx::st_shared(word, codes_of_pass<spec.element>(codes, pass, given));
  }
}

}  // namespace fovea::cuda::sm90
