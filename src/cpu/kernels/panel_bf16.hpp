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

/// Queries as pairs, zeros from head_dim to `padded` (even).
inline void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                         std::int64_t head_dim, std::int64_t padded, void* queries) {
  auto* out = static_cast<std::uint32_t*>(queries);
  std::uint16_t row[512 + 32];
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

inline void zero_non_finite(std::uint16_t* row, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if ((row[i] & 0x7f80U) == 0x7f80U) row[i] = 0;
  }
}

/// fp32 probabilities [keys][lanes] as pairs [padded_keys / 2][lanes], rounded to nearest even; padding keys are 0.
FOVEA_AVX512_BF16 inline void pack_probabilities(const float* scores, std::int64_t num_keys,
                                                 std::int64_t padded_keys, std::uint32_t* out) {
  // cvtne2ps gives 16 values of one key, then 16 of the next: this order interleaves them.
  alignas(64) static constexpr std::uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kInterleave);
  for (std::int64_t key = 0; key < padded_keys; key += 2) {
    for (std::int64_t lane = 0; lane < kLanes; lane += kVectorLanes) {
      const float* at = scores + key * kLanes + lane;
      const __m512 first = key < num_keys ? _mm512_load_ps(at) : _mm512_setzero_ps();
      const __m512 second = key + 1 < num_keys ? _mm512_load_ps(at + kLanes) : _mm512_setzero_ps();
      const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
      _mm512_store_si512(out + key / 2 * kLanes + lane, _mm512_permutexvar_epi16(order, both));
    }
  }
}

}  // namespace fovea::cpu::bf16

#endif
