// bf16 products by vdpbf16ps: two multiply-adds per lane and instruction, sums in fp32.
//
// Bound: the vdpbf16ps rate, twice the f32 rate on Zen 4 and 5 and half of it on the Intel cores measured, which is why
// features.cpp picks it on AMD only. Same register block as f32 (8 rows x 3 vectors).
#include "cpu/kernels/panel.hpp"

#if defined(__x86_64__)

#include "cpu/kernels/panel_bf16.hpp"

namespace fovea::cpu {
namespace {

using bf16::aligned_bytes;
using bf16::kLanes;
using bf16::kVectorLanes;
using bf16::round_up;

constexpr int kBlockRows = 8;
constexpr int kVectors = 3;

std::size_t query_bytes(std::int64_t head_dim) {
  return aligned_bytes(round_up(head_dim, 2) * kLanes * 2);
}
std::size_t key_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return aligned_bytes(tile_kv * round_up(head_dim, 2) * 2);
}
/// Pairs from one group of value columns to the next; a cache line apart from a power of two (panel-inl.hpp).
constexpr std::int64_t group_pitch(std::int64_t num_keys) {
  return round_up(num_keys, 2) / 2 * kBlockRows + 16;
}
std::size_t value_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  const std::int64_t padded = round_up(head_dim, kBlockRows);
  return aligned_bytes(group_pitch(tile_kv) * (padded / kBlockRows) * 4) +
         aligned_bytes(2 * padded * 2);
}
void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                  std::int64_t head_dim, void* queries) {
  bf16::pack_queries(rows, dtype, col_stride, head_dim, round_up(head_dim, 2), queries);
}

KeyTile load_keys(const TileSource& source, void* buffer) {
  const bool is_ready =
      source.dtype == Dtype::bf16 && source.col_stride == 1 && source.num_cols % 2 == 0;
  if (is_ready) return {source.data, source.row_stride, source.num_rows};
  auto* out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, 2);
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t key = 0; key < source.num_rows; ++key) {
    bf16::convert_row(source.data + key * row_bytes, source.dtype, source.col_stride,
                      source.num_cols, padded, out + key * padded);
  }
  return {out, padded, source.num_rows};
}

/// Values as [head_dim / kBlockRows][keys / 2][kBlockRows] pairs (key, key + 1).
void load_values(const TileSource& source, bool is_careful, void* buffer) {
  auto* out = static_cast<std::uint32_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, kBlockRows);
  const std::int64_t pitch = group_pitch(source.num_rows);
  auto* rows = reinterpret_cast<std::uint16_t*>(out + padded / kBlockRows * pitch);
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t key = 0; key < source.num_rows; key += 2) {
    for (std::int64_t i = 0; i < 2; ++i) {
      std::uint16_t* row = rows + i * padded;
      if (key + i < source.num_rows) {
        bf16::convert_row(source.data + (key + i) * row_bytes, source.dtype, source.col_stride,
                          source.num_cols, padded, row);
        if (is_careful) bf16::zero_non_finite(row, source.num_cols);
      } else {
        std::fill_n(row, padded, std::uint16_t{0});
      }
    }
    for (std::int64_t d = 0; d < padded; ++d) {
      out[d / kBlockRows * pitch + key / 2 * kBlockRows + d % kBlockRows] =
          rows[d] | static_cast<std::uint32_t>(rows[padded + d]) << 16U;
    }
  }
}

/// The pair at `at` in every lane.
FOVEA_AVX512_BF16 inline __m512bh broadcast_pair(const void* at) {
  std::int32_t pair = 0;
  std::memcpy(&pair, at, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

FOVEA_AVX512_BF16 inline __m512bh load_pairs(const std::uint32_t* at) {
  return reinterpret_cast<__m512bh>(_mm512_load_si512(at));
}

template <int kRows>
FOVEA_AVX512_BF16 inline void scores_block(const std::uint32_t* queries, const std::uint16_t* keys,
                                           std::int64_t key_stride, std::int64_t num_pairs,
                                           float* out) {
  __m512 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
  }
  for (std::int64_t i = 0; i < num_pairs; ++i) {
    __m512bh q[kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) q[v] = load_pairs(queries + i * kLanes + v * kVectorLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh k = broadcast_pair(keys + r * key_stride + 2 * i);
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], k, q[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v)
      _mm512_store_ps(out + r * kLanes + v * kVectorLanes, sum[r][v]);
  }
}

FOVEA_AVX512_BF16 void scores(const void* queries, const KeyTile& keys, KeyRange range,
                              std::int64_t head_dim, int /*num_vectors*/, float* out,
                              NextTile& next) {
  const auto* q = static_cast<const std::uint32_t*>(queries);
  const auto* k = static_cast<const std::uint16_t*>(keys.data) + range.begin * keys.row_stride;
  const std::int64_t num_pairs = round_up(head_dim, 2) / 2;
  std::int64_t key = 0;
  for (; key + kBlockRows <= range.count; key += kBlockRows) {
    scores_block<kBlockRows>(q, k + key * keys.row_stride, keys.row_stride, num_pairs,
                             out + key * kLanes);
    next.fetch();
  }
  for (; key < range.count; ++key) {
    scores_block<1>(q, k + key * keys.row_stride, keys.row_stride, num_pairs, out + key * kLanes);
  }
}

void pack_probabilities(float* probabilities, std::int64_t num_keys) {
  bf16::pack_probabilities(probabilities, num_keys, round_up(num_keys, 2));
}

void softmax(float* scores, std::int64_t num_keys, int num_vectors, float scale_log2,
             const PanelState& state, const PanelDropout& dropout) {
  panel_kernels(CpuTarget::avx512)
      ->softmax(scores, num_keys, num_vectors, scale_log2, state, dropout);
  pack_probabilities(scores, num_keys);
}

/// kPairPitch: from one pair of keys to the next, in pairs of one lane.
template <std::int64_t kPairPitch>
FOVEA_AVX512_BF16 void accumulate(const void* values, std::int64_t tile_keys, KeyRange range,
                                  const void* probabilities, std::int64_t head_dim,
                                  int /*num_vectors*/, const float* rescale, float* out,
                                  NextTile& next) {
  const auto* v_pairs = static_cast<const std::uint32_t*>(values) + range.begin / 2 * kBlockRows;
  const auto* p_pairs = static_cast<const std::uint32_t*>(probabilities);
  const std::int64_t num_pairs = round_up(range.count, 2) / 2;
  for (std::int64_t begin = 0; begin < head_dim; begin += kBlockRows) {
    float* rows = out + begin * kLanes;
    __m512 sum[kBlockRows][kVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const __m512 factor = _mm512_load_ps(rescale + v * kVectorLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        sum[r][v] = _mm512_mul_ps(_mm512_load_ps(rows + r * kLanes + v * kVectorLanes), factor);
      }
    }
    for (std::int64_t i = 0; i < num_pairs; ++i) {
      __m512bh p[kVectors];
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v)
        p[v] = load_pairs(p_pairs + i * kPairPitch + v * kVectorLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        const __m512bh value = broadcast_pair(v_pairs + i * kBlockRows + r);
#pragma GCC unroll 3
        for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], value, p[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v)
        _mm512_store_ps(rows + r * kLanes + v * kVectorLanes, sum[r][v]);
    }
    v_pairs += group_pitch(tile_keys);
    next.fetch();
  }
}

PanelKernels make_kernels() {
  PanelKernels kernels = *panel_kernels(CpuTarget::avx512);
  kernels.key_block = kBlockRows;
  kernels.value_block = kBlockRows;
  kernels.product = Dtype::bf16;
  kernels.query_bytes = query_bytes;
  kernels.key_bytes = key_bytes;
  kernels.value_bytes = value_bytes;
  kernels.pack_queries = pack_queries;
  kernels.load_keys = load_keys;
  kernels.load_values = load_values;
  kernels.scores = scores;
  kernels.softmax = softmax;
  kernels.pack_probabilities = pack_probabilities;
  kernels.accumulate = accumulate<kLanes>;
  return kernels;
}

}  // namespace

void bf16::accumulate_gradients(const void* values, std::int64_t tile_keys, KeyRange range,
                                const void* gradients, std::int64_t head_dim, int num_vectors,
                                const float* rescale, float* out, NextTile& next) {
  accumulate<2 * kLanes>(values, tile_keys, range, gradients, head_dim, num_vectors, rescale, out,
                         next);
}

const PanelKernels* panel_kernels_avx512_bf16() {
  static const PanelKernels kernels = make_kernels();
  return &kernels;
}

}  // namespace fovea::cpu

#endif
