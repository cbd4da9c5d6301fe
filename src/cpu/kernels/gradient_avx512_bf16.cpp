// The gradient steps by vdpbf16ps: bf16 products, sums in fp32; P and dS are rounded to bf16 between. S and dP are the
// forward panel's `scores`; the three products behind them:
//
//   dV[key][d]   += pairs of lanes of P, broadcast · dO pairs of rows [lanes / 2][d]      and dK likewise from dS and Q
//   dQᵀ[d][lane] += pairs of keys of Kᵀ, broadcast · dS pairs of keys [keys / 2][lanes]
//
// Where P and dS lie: the fp32 scores of two keys have room for both layouts, so these replace them. Bytes of two keys:
//   [ pairs (key, key + 1), 48 lanes: 192 ][ key, 48 lanes: 96 ][ key + 1, 48 lanes: 96 ]
//
// Bound: the vdpbf16ps rate, as for panel_avx512_bf16.cpp; accumulate_rows keeps 6 keys x 4 vectors of d, or 8 x 3.
#include "cpu/kernels/gradient.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <cstring>

#include "cpu/kernels/panel_bf16.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cpu {
namespace {

using bf16::aligned_bytes;
using bf16::kLanes;
using bf16::kVectorLanes;
using bf16::round_up;

constexpr std::int64_t kPairFloats = 2 * kLanes;  // of two keys of scores, P or dS
constexpr std::int64_t kRowsBegin = 4 * kLanes;   // bytes of the pairs, in front of the two rows
constexpr std::int64_t kRowBytes = 2 * kLanes;    // of one key
constexpr int kPanelVectors = 3;
constexpr int kSumVectors = 4;

constexpr std::int64_t padded(std::int64_t head_dim) { return round_up(head_dim, kVectorLanes); }

std::size_t row_bytes(std::int64_t head_dim) {
  return aligned_bytes(padded(head_dim) * kLanes * 2);
}

/// A panel that walks a chunk again and again reads rows that lie apart from copies.
KeyTile load_keys(const TileSource& source, void* buffer) {
  TileSource rows = source;
  if (rows.dtype != Dtype::bf16 || rows.col_stride != 1 || rows.row_stride == rows.num_cols)
    return panel_kernels_avx512_bf16()->load_keys(rows, buffer);
  auto* const out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t pitch = round_up(rows.num_cols, 2);
  for (std::int64_t key = 0; key < rows.num_rows; ++key) {
    bf16::convert_row(rows.row(key), rows.dtype, rows.col_stride, rows.num_cols, pitch,
                      out + key * pitch);
  }
  return {out, pitch, rows.num_rows};
}

/// Pairs of rows [lanes / 2][padded(head_dim)].
bool pack_rows(const std::byte* const* rows, std::int64_t num_rows, Dtype dtype,
               std::int64_t col_stride, std::int64_t head_dim, void* out) {
  const std::int64_t width = padded(head_dim);
  std::uint16_t pair[2][kMaxHeadDim + kVectorLanes];
  bool is_finite = true;
  for (std::int64_t row = 0; row < num_rows; row += 2) {
    for (std::int64_t i = 0; i < 2; ++i) {
      if (row + i == num_rows) {
        std::fill_n(pair[i], width, std::uint16_t{0});
        continue;
      }
      bf16::convert_row(rows[row + i], dtype, col_stride, head_dim, width, pair[i]);
      is_finite &= bf16::zero_non_finite(pair[i], head_dim);
    }
    std::uint32_t* const to = static_cast<std::uint32_t*>(out) + row / 2 * width;
    for (std::int64_t d = 0; d < width; ++d)
      to[d] = pair[0][d] | static_cast<std::uint32_t>(pair[1][d]) << 16U;
  }
  return is_finite;
}

// ---- P and dS, rounded ----

/// 16 lanes of two keys: of the first in the low half. NaN stays NaN, which round_pairs does not promise.
FOVEA_AVX512_BF16 inline __m512i narrow(__m512 first, __m512 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

/// From fp32 [keys][lanes] to the layout of this file's essay; a last key without a partner gets one of zeros.
FOVEA_AVX512_BF16 void round_in_place(float* values, std::int64_t num_keys) {
  const __m512i interleaved =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (std::int64_t key = 0; key < num_keys; key += 2, values += kPairFloats) {
    __m512i both[kPanelVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kPanelVectors; ++v) {
      const float* const at = values + v * kVectorLanes;
      both[v] = narrow(_mm512_load_ps(at),
                       key + 1 < num_keys ? _mm512_load_ps(at + kLanes) : _mm512_setzero_ps());
    }
    auto* const rows = reinterpret_cast<std::byte*>(values) + kRowsBegin;
#pragma GCC unroll 3
    for (int v = 0; v < kPanelVectors; ++v) {
      _mm512_store_si512(values + v * kVectorLanes, _mm512_permutexvar_epi16(interleaved, both[v]));
      std::byte* const row = rows + v * kVectorLanes * 2;
      _mm256_store_si256(reinterpret_cast<__m256i*>(row), _mm512_castsi512_si256(both[v]));
      _mm256_store_si256(reinterpret_cast<__m256i*>(row + kRowBytes),
                         _mm512_extracti64x4_epi64(both[v], 1));
    }
  }
}

void pack_gradients(const SoftmaxGradient& step) {
  round_in_place(step.scores, step.num_keys);
  if (step.products != nullptr) round_in_place(step.products, step.num_keys);
}

void softmax_gradient(const SoftmaxGradient& step) {
  gradient_kernels(CpuTarget::avx512)->softmax_gradient(step);
  if (!step.is_read_between) pack_gradients(step);
}

// ---- products ----

FOVEA_AVX512_BF16 inline __m512bh broadcast_pair(const void* at) {
  std::int32_t pair = 0;
  std::memcpy(&pair, at, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

FOVEA_AVX512_BF16 inline __m512bh load_pairs(const std::uint32_t* at) {
  return reinterpret_cast<__m512bh>(_mm512_load_si512(at));
}

/// What the sums of some keys are made of.
struct RowSums {
  const std::byte* weights = nullptr;   // of two keys and all lanes, in turn
  std::int64_t num_pairs = 0;           // of rows
  const std::uint32_t* rows = nullptr;  // pairs, `width` apart
  std::int64_t width = 0;
  float* sums = nullptr;
  std::int64_t pitch = 0;
};

template <int kKeys, int kVectors>
FOVEA_AVX512_BF16 inline void sum_block(const RowSums& x, std::int64_t key) {
  float* const to = x.sums + key * x.pitch;
  __m512 sum[kKeys][kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[k][v] = _mm512_load_ps(to + k * x.pitch + v * kVectorLanes);
  }
  // `key` is even: key k of the block is the first or second of its pair as k is.
  const std::byte* const weights = x.weights + key / 2 * (kPairFloats * 4) + kRowsBegin;
  for (std::int64_t i = 0; i < x.num_pairs; ++i) {
    __m512bh row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) row[v] = load_pairs(x.rows + i * x.width + v * kVectorLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const __m512bh weight =
          broadcast_pair(weights + k / 2 * (kPairFloats * 4) + k % 2 * kRowBytes + i * 4);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[k][v] = _mm512_dpbf16_ps(sum[k][v], weight, row[v]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      _mm512_store_ps(to + k * x.pitch + v * kVectorLanes, sum[k][v]);
  }
}

/// kVectors of d of all keys. The last ones, fewer than a block, two at a time; an odd last one brings the zeros of its
/// partner along: sums have room for it.
template <int kVectors>
FOVEA_AVX512_BF16 void sum_columns(const RowSums& x, std::int64_t num_keys) {
  constexpr int kKeys = kVectors == kSumVectors ? 6 : 8;
  std::int64_t key = 0;
  for (; key + kKeys <= num_keys; key += kKeys) sum_block<kKeys, kVectors>(x, key);
  for (; key < num_keys; key += 2) sum_block<2, kVectors>(x, key);
}

void accumulate_rows(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                     const void* rows, std::int64_t head_dim, float* sums) {
  RowSums x{.weights = reinterpret_cast<const std::byte*>(weights),
            .num_pairs = round_up(num_rows, 2) / 2,
            .rows = static_cast<const std::uint32_t*>(rows),
            .width = padded(head_dim),
            .sums = sums,
            .pitch = gradient_kernels(CpuTarget::avx512)->row_pitch(head_dim)};
  for (std::int64_t vectors = x.width / kVectorLanes; vectors > 0;) {
    // Blocks of even width: 5 vectors are 3 and 2, not 4 and 1.
    const std::int64_t blocks = (vectors + kSumVectors - 1) / kSumVectors;
    const std::int64_t width = (vectors + blocks - 1) / blocks;
    constexpr void (*kSums[])(const RowSums&, std::int64_t) = {sum_columns<1>, sum_columns<2>,
                                                               sum_columns<3>, sum_columns<4>};
    kSums[width - 1](x, num_keys);
    x.rows += width * kVectorLanes;
    x.sums += width * kVectorLanes;
    vectors -= width;
  }
}

PanelKernels make_panel() {
  PanelKernels kernels = *panel_kernels_avx512_bf16();
  kernels.load_keys = load_keys;
  kernels.softmax = panel_kernels(CpuTarget::avx512)->softmax;  // of rows that are summed again
  kernels.accumulate = bf16::accumulate_gradients;
  return kernels;
}

GradientKernels make_gradients() {
  GradientKernels kernels = *gradient_kernels(CpuTarget::avx512);
  kernels.row_bytes = row_bytes;
  kernels.pack_rows = pack_rows;
  kernels.softmax_gradient = softmax_gradient;
  kernels.pack_gradients = pack_gradients;
  kernels.accumulate_rows = accumulate_rows;
  return kernels;
}

}  // namespace

const PanelKernels* gradient_panel_kernels_avx512_bf16() {
  static const PanelKernels kernels = make_panel();
  return &kernels;
}

const GradientKernels* gradient_kernels_avx512_bf16() {
  static const GradientKernels kernels = make_gradients();
  return &kernels;
}

}  // namespace fovea::cpu

#endif
