// Tile products of codes of eight bits, cut so small that vector work fits between them: 32 rows of codes by 48 lanes
// of quads, four codes in a word. Sums are tiles 0 to 5, s32; 6 and 7 are operands. Layouts: codes.hpp; why vector work
// stands between tile instructions: panel_amx_tiles.hpp. And what sums of values add to Oᵀ.
#pragma once

#if defined(__x86_64__)

#include <algorithm>
#include <cstdint>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/codes.hpp"
#include "cpu/kernels/panel_amx_softmax.hpp"
#include "cpu/kernels/panel_amx_tiles.hpp"

// What amx.hpp knows, and products of eight bits.
#define FOVEA_AMX_INT8 \
  __attribute__((      \
      target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,amx-int8")))
#define FOVEA_AMX_INT8_INLINE FOVEA_AMX_INT8 __attribute__((always_inline)) inline

namespace fovea::cpu::amx {

/// Two tiles of rows, which come with the hint that they will not be needed soon, times three vectors of quads.
#define FOVEA_MULTIPLY_CODES(multiply, rows, pitch, quads)    \
  _tile_stream_loadd(6, rows, pitch);                         \
  _tile_loadd(7, quads, kLaneBytes);                          \
  multiply(0, 6, 7);                                          \
  _tile_loadd(7, (quads) + 16, kLaneBytes);                   \
  multiply(1, 6, 7);                                          \
  _tile_loadd(7, (quads) + 32, kLaneBytes);                   \
  multiply(2, 6, 7);                                          \
  work.fill_gap();                                            \
  _tile_stream_loadd(6, (rows) + kTileRows * (pitch), pitch); \
  multiply(5, 6, 7);                                          \
  _tile_loadd(7, (quads) + 16, kLaneBytes);                   \
  multiply(4, 6, 7);                                          \
  _tile_loadd(7, quads, kLaneBytes);                          \
  multiply(3, 6, 7);                                          \
  work.fill_gap()

/// Sums of kJobRows keys over `depth` codes, from the corrections of the lanes: a row stride of 0 puts them into every
/// row.
template <class VectorWork>
FOVEA_AMX_INT8_INLINE void multiply_key_codes(const std::uint8_t* codes, std::int64_t pitch,
                                              std::int64_t depth, const std::int32_t* quads,
                                              const std::int32_t* corrections, VectorWork& work) {
  _tile_loadd(0, corrections, 0);
  _tile_loadd(1, corrections + 16, 0);
  _tile_loadd(2, corrections + 32, 0);
  _tile_loadd(3, corrections, 0);
  _tile_loadd(4, corrections + 16, 0);
  _tile_loadd(5, corrections + 32, 0);
  for (std::int64_t d = 0; d < depth; d += kTileBytes) {
    FOVEA_MULTIPLY_CODES(_tile_dpbusd, codes, pitch, quads);
    codes += kTileBytes;
    quads += kTileBytes / 4 * kLanes;
  }
}

/// Sums of kJobRows channels over `num_keys` codes.
template <class VectorWork>
FOVEA_AMX_INT8_INLINE void multiply_value_codes(const std::uint8_t* codes, std::int64_t pitch,
                                                std::int64_t num_keys, const std::int32_t* quads,
                                                VectorWork& work) {
  zero_sums();
  for (std::int64_t key = 0; key < num_keys; key += kTileBytes) {
    FOVEA_MULTIPLY_CODES(_tile_dpbsud, codes, pitch, quads);
    codes += kTileBytes;
    quads += kTileBytes / 4 * kLanes;
  }
}

#undef FOVEA_MULTIPLY_CODES

inline constexpr std::int64_t kStoreGaps = 3;
template <class VectorWork>
FOVEA_AMX_INT8_INLINE void store_code_sums(void* sums, VectorWork& work) {
  auto* const first = static_cast<std::int32_t*>(sums);
  auto* const second = first + kTileRows * kLanes;
  _tile_stored(0, first, kLaneBytes);
  _tile_stored(1, first + 16, kLaneBytes);
  work.fill_gap();
  _tile_stored(2, first + 32, kLaneBytes);
  _tile_stored(5, second + 32, kLaneBytes);
  work.fill_gap();
  _tile_stored(4, second + 16, kLaneBytes);
  _tile_stored(3, second, kLaneBytes);
  work.fill_gap();
}

/// Is Oᵀ multiplied by 1 alone?
FOVEA_AMX_INT8_INLINE bool keeps_sums(const float* rescale) {
  unsigned keeps = 0xffffU;
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) {
    const __m512 of_rows = _mm512_load_ps(rescale + v * kVectorLanes);
    keeps &= _mm512_cmp_ps_mask(of_rows, _mm512_set1_ps(1.0F), _CMP_EQ_OQ);
  }
  return keeps == 0xffffU;
}

/// The block of kJobRows channels from `channel` on: a row of Oᵀ after the other, three cache lines each. weights
/// and rescales: [lanes].
template <bool kRescales>
FOVEA_AMX_INT8_INLINE void add_code_sums(const CodedValues& values, std::int64_t channel,
                                         const std::int32_t* sums, const float* weights,
                                         const float* rescales, float* out) {
  const std::int64_t count = std::min(kJobRows, values.head_dim - channel);
  const float* const scale = values.scale + channel;
  out += channel * kLanes;
  __m512 weight[kVectors], rescale[kVectors];
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = _mm512_load_ps(weights + v * kVectorLanes);
    rescale[v] = _mm512_load_ps(rescales + v * kVectorLanes);
  }
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t at = i * kLanes + v * kVectorLanes;
      __m512 before = _mm512_load_ps(out + at);
      if constexpr (kRescales) before = _mm512_mul_ps(before, rescale[v]);
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums + at));
      const __m512 factor = _mm512_mul_ps(weight[v], _mm512_set1_ps(scale[i]));
      _mm512_store_ps(out + at, _mm512_fmadd_ps(factor, sum, before));
    }
  }
}

}  // namespace fovea::cpu::amx

#endif
