// What the two bf16 products share: operands as pairs of bf16 along the summed dimension.
//
//   queries        [head_dim / 2][lanes]  pairs (d, d + 1)
//   keys           [keys][head_dim]       rows of bf16: the caller's own where they fit
//   probabilities  [keys / 2][lanes]      pairs (key, key + 1)
// Softmax and programs stay in fp32 and come from the f32 kernels of AVX-512.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/scalar_io.hpp"
#include "cpu/kernels/panel.hpp"
#include "problem/head_dim.hpp"

// Intrinsics rather than Highway: the Highway of Debian 12 has no bf16 dot product.
#define FOVEA_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace fovea::cpu::bf16 {

inline constexpr std::int64_t kLanes = 48;  // of the AVX-512 f32 panel
inline constexpr std::int64_t kVectorLanes = 16;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::size_t aligned_bytes(std::int64_t bytes) {
  return static_cast<std::size_t>(round_up(bytes, 64));
}

/// `count` elements of a row as bf16, then zeros up to `padded`.
inline void convert_row(const std::byte* row, Dtype dtype, std::int64_t col_stride,
                        std::int64_t count, std::int64_t padded, std::uint16_t* out) {
  if (dtype == Dtype::bf16 && col_stride == 1) {
    std::memcpy(out, row, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
  } else if (dtype == Dtype::bf16) {
    const auto* from = reinterpret_cast<const std::uint16_t*>(row);
    for (std::int64_t i = 0; i < count; ++i) out[i] = from[i * col_stride];
  } else {
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = bfloat16(load_scalar(row, dtype, i * col_stride)).bits;
  }
  std::fill(out + count, out + padded, std::uint16_t{0});
}

/// 16 x 16 transpose of 32-bit elements in registers: four rounds of exchanging halves.
FOVEA_AVX512_BF16 inline void transpose_16x16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

/// Rows of bf16 that lie side by side, head_dim a multiple of 32: 16 rows by 16 pairs at a time.
FOVEA_AVX512_BF16 inline void pack_near_queries(const std::byte* const* rows, std::int64_t head_dim,
                                                std::uint32_t* out) {
  for (std::int64_t lane = 0; lane < kLanes; lane += kVectorLanes) {
    for (std::int64_t i = 0; i < head_dim; i += 2 * kVectorLanes) {
      __m512i block[kVectorLanes];
      for (std::int64_t r = 0; r < kVectorLanes; ++r) {
        const std::byte* row = rows[lane + r];
        block[r] = row == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(row + i * 2);
      }
      transpose_16x16(block);
      for (std::int64_t r = 0; r < kVectorLanes; ++r) {
        _mm512_store_si512(out + (i / 2 + r) * kLanes + lane, block[r]);
      }
    }
  }
}

/// Queries as pairs, zeros from head_dim to `padded` (even).
inline void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                         std::int64_t head_dim, std::int64_t padded, void* queries) {
  auto* out = static_cast<std::uint32_t*>(queries);
  if (dtype == Dtype::bf16 && col_stride == 1 && head_dim % 32 == 0) {
    pack_near_queries(rows, head_dim, out);
    return;
  }
  std::uint16_t row[kMaxHeadDim + 32];
  for (std::int64_t lane = 0; lane < kLanes; ++lane) {
    if (rows[lane] == nullptr) {
      std::fill_n(row, padded, std::uint16_t{0});
    } else {
      convert_row(rows[lane], dtype, col_stride, head_dim, padded, row);
    }
    for (std::int64_t i = 0; i < padded; i += 2) {
      out[i / 2 * kLanes + lane] = row[i] | static_cast<std::uint32_t>(row[i + 1]) << 16U;
    }
  }
}

/// Infinity and NaN become 0. Were all finite?
inline bool zero_non_finite(std::uint16_t* row, std::int64_t count) {
  bool is_finite = true;
  for (std::int64_t i = 0; i < count; ++i) {
    if ((row[i] & 0x7f80U) != 0x7f80U) continue;
    row[i] = 0;
    is_finite = false;
  }
  return is_finite;
}

/// Pairs of bf16, rounded to nearest, halves up: four operations where the instruction that converts two vectors and a
/// permutation to interleave them take as long as six. Note: a NaN whose payload is all ones becomes a number; its
/// row's sum is NaN all the same.
FOVEA_AVX512_BF16 __attribute__((always_inline)) inline __m512i round_pairs(__m512 first,
                                                                            __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
  return _mm512_mask_mov_epi16(low, 0xaaaaaaaaU, high);
}

/// In place: fp32 probabilities [keys][lanes] as pairs [padded_keys / 2][lanes], rounded to nearest; padding keys are
/// 0.
FOVEA_AVX512_BF16 inline void pack_probabilities(float* scores, std::int64_t num_keys,
                                                 std::int64_t padded_keys) {
  // Pairs of keys i, i + 1 go to row i / 2, which has been read by then.
  auto* out = reinterpret_cast<std::uint32_t*>(scores);
  for (std::int64_t key = 0; key < padded_keys; key += 2) {
    for (std::int64_t lane = 0; lane < kLanes; lane += kVectorLanes) {
      const float* at = scores + key * kLanes + lane;
      const __m512 first = key < num_keys ? _mm512_load_ps(at) : _mm512_setzero_ps();
      const __m512 second = key + 1 < num_keys ? _mm512_load_ps(at + kLanes) : _mm512_setzero_ps();
      _mm512_store_si512(out + key / 2 * kLanes + lane, round_pairs(first, second));
    }
  }
}

/// The second product of panel_avx512_bf16.cpp, of pairs that stand two rows apart (gradient_avx512_bf16.cpp).
void accumulate_gradients(const void* values, std::int64_t tile_keys, KeyRange range,
                          const void* gradients, std::int64_t head_dim, int num_vectors,
                          const float* rescale, float* out, NextTile& next);

}  // namespace fovea::cpu::bf16

#endif
