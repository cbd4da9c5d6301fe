// The gradient steps by AMX: bf16 products of tiles, sums in fp32; P and dS are rounded to bf16 between.
//
//   Sᵀ[32 keys][32 lanes]  = K[32 keys][d] · Qᵀ pairs of d [d / 2][lanes]            and dPᵀ likewise from V and dO
//   dV[32 keys][32 d]     += P[32 keys][lanes] · dO pairs of lanes [lanes / 2][d]    and dK likewise from dS and Q
//   dQᵀ[32 d][32 lanes]   += Kᵀ[32 d][keys] · dS pairs of keys [keys / 2][lanes]
// So the first operand is a row of what is multiplied as it lies: K and V in the caller's memory, P and dS as they
// leave the vector unit, Kᵀ transposed once per chunk. The second comes in pairs along the summed dimension: Q and dO
// are packed twice per panel and chunk (pairs of d, pairs of lanes), dS is written twice.
//
// Where P and dS lie: a row of fp32 scores has room for both layouts, so they replace it. For a pair of keys and 32
// lanes
//     row of key 2i     [ key 2i,     32 lanes ][ pairs, columns of the first tile  ]     64 bytes each
//     row of key 2i + 1 [ key 2i + 1, 32 lanes ][ pairs, columns of the second tile ]
// The columns of these two tiles are the lanes in the order in which unpacking leaves them, and so are those of dQᵀ:
// add_queries knows.
//
// Bound: 2 x 2 tiles of sums, two of each operand: 4 loads (8 cycles each from the first-level cache) for 4 products of
// 16 cycles. docs/kernels/attention_backward_cpu.md counts the rest.
#include "cpu/kernels/gradient.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <limits>
#include <numbers>

#include "core/scalar_io.hpp"
#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/panel_bf16.hpp"

namespace fovea::cpu {
namespace {

using amx::CompilerFence;
using amx::kTileBytes;
using amx::kTileDepth;
using amx::kTileRows;
using bf16::aligned_bytes;
using bf16::round_up;

constexpr std::int64_t kLanes = 64;  // 32 of each vector and tile register block; sums of dK and dV
                                     // are loaded and stored once per panel
constexpr std::int64_t kBlock = 32;  // rows and columns of a block of 2 x 2 tiles
constexpr std::int64_t kVector = 16;              // fp32 lanes
constexpr std::int64_t kRowBytes = kLanes * 4;    // of scores, P and dS
constexpr std::int64_t kBlockBytes = kBlock * 4;  // of 32 lanes in them
constexpr int kBlockVectors = 2;

/// Zeros stand behind every operand up to a multiple of this.
constexpr std::int64_t padded(std::int64_t count) { return round_up(count, kBlock); }

/// Elements from one row of Kᵀ to the next; a cache line more than the keys, so that rows do not share one cache set.
constexpr std::int64_t column_pitch(std::int64_t num_keys) { return padded(num_keys) + 32; }

/// A cache line more for wide rows, for the same reason.
std::int64_t row_pitch(std::int64_t head_dim) {
  return padded(head_dim) + (head_dim > 64 ? 16 : 0);
}

std::size_t query_bytes(std::int64_t head_dim) {
  return aligned_bytes(padded(head_dim) * kLanes * 2);
}
std::size_t row_bytes(std::int64_t head_dim) {
  return aligned_bytes(padded(head_dim) * kLanes * 2);
}
std::size_t key_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return aligned_bytes(padded(tile_kv) * padded(head_dim) * 2);
}
std::size_t column_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return aligned_bytes(padded(head_dim) * column_pitch(tile_kv) * 2);
}
std::size_t score_bytes(std::int64_t tile_kv) { return aligned_bytes(padded(tile_kv) * kRowBytes); }
std::size_t output_bytes(std::int64_t head_dim) {
  return aligned_bytes(padded(head_dim) * kRowBytes);
}

// ---- rows of any dtype as bf16 ----

/// 32 elements as bf16, rounded to nearest even.
FOVEA_AMX_INLINE __m512i narrow(__m512 high, __m512 low) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

/// Elements [begin, begin + 32) of a row, zeros from `count` on and for no row.
struct RowReader {
  Dtype dtype;
  std::int64_t col_stride;
  std::int64_t count;

  FOVEA_AMX_INLINE __m512i read(const std::byte* row, std::int64_t begin) const {
    if (row == nullptr) return _mm512_setzero_si512();
    const std::int64_t rest = std::min(kTileDepth, count - begin);
    const auto mask = static_cast<__mmask32>((std::uint64_t{1} << rest) - 1);
    if (dtype == Dtype::bf16 && col_stride == 1)
      return _mm512_maskz_loadu_epi16(mask, row + begin * 2);
    if (dtype == Dtype::f32 && col_stride == 1) {
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), row + begin * 4);
      const __m512 high =
          _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16U), row + begin * 4 + 64);
      return narrow(high, low);
    }
    alignas(64) std::uint16_t elements[kTileDepth] = {};
    for (std::int64_t i = 0; i < rest; ++i)
      elements[i] = bfloat16(load_scalar(row, dtype, (begin + i) * col_stride)).bits;
    return _mm512_load_si512(elements);
  }
};

/// Infinity and NaN become 0; is_finite learns of them.
FOVEA_AMX_INLINE __m512i without_non_finite(__m512i x, bool& is_finite) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __mmask32 keeps = _mm512_cmpneq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
  is_finite &= keeps == 0xffffffffU;
  return _mm512_maskz_mov_epi16(keeps, x);
}

/// Pairs (a[i], b[i]) of 32 elements, in order.
struct Pairs {
  __m512i low, high;
};
FOVEA_AMX_INLINE __m512i pairs_of(__m256i a, __m256i b) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}
FOVEA_AMX_INLINE Pairs interleave(__m512i a, __m512i b) {
  return {pairs_of(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b)),
          pairs_of(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1))};
}

/// Pairs of d: [head_dim / 2][lanes].
FOVEA_AMX void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                            std::int64_t head_dim, void* queries) {
  auto* out = static_cast<std::uint32_t*>(queries);
  const RowReader reader{dtype, col_stride, head_dim};
  for (std::int64_t d = 0; d < head_dim; d += kTileDepth) {
    for (std::int64_t lane = 0; lane < kLanes; lane += kVector) {
      __m512i block[kVector];
      for (std::int64_t i = 0; i < kVector; ++i) block[i] = reader.read(rows[lane + i], d);
      bf16::transpose_16x16(block);
      for (std::int64_t i = 0; i < kVector; ++i)
        _mm512_store_si512(out + (d / 2 + i) * kLanes + lane, block[i]);
    }
  }
}

/// Pairs of rows: [lanes / 2][padded(head_dim)].
FOVEA_AMX bool pack_rows(const std::byte* const* rows, std::int64_t num_rows, Dtype dtype,
                         std::int64_t col_stride, std::int64_t head_dim, void* out) {
  auto* to = static_cast<std::uint32_t*>(out);
  const RowReader reader{dtype, col_stride, head_dim};
  bool is_finite = true;
  for (std::int64_t row = 0; row < padded(num_rows); row += 2) {
    const std::byte* const first = row < num_rows ? rows[row] : nullptr;
    const std::byte* const second = row + 1 < num_rows ? rows[row + 1] : nullptr;
    for (std::int64_t d = 0; d < head_dim; d += kTileDepth) {
      const Pairs pairs = interleave(without_non_finite(reader.read(first, d), is_finite),
                                     without_non_finite(reader.read(second, d), is_finite));
      std::uint32_t* const at = to + row / 2 * padded(head_dim) + d;
      _mm512_store_si512(at, pairs.low);
      _mm512_store_si512(at + kVector, pairs.high);
    }
  }
  return is_finite;
}

/// Rows of K or V as they are, or copied where they lie apart: a chunk is read by every panel.
FOVEA_AMX KeyTile load_keys(const TileSource& source, void* buffer) {
  const bool is_ready = source.dtype == Dtype::bf16 && source.col_stride == 1 &&
                        source.row_stride == source.num_cols && source.num_cols % kBlock == 0 &&
                        source.num_rows % kBlock == 0;
  if (is_ready) return {source.data, source.row_stride, source.num_rows};
  auto* const out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t pitch = padded(source.num_cols);
  const RowReader reader{source.dtype, source.col_stride, source.num_cols};
  for (std::int64_t key = 0; key < padded(source.num_rows); ++key) {
    const std::byte* const row = key < source.num_rows ? source.row(key) : nullptr;
    for (std::int64_t d = 0; d < source.num_cols; d += kTileDepth)
      _mm512_store_si512(out + key * pitch + d, reader.read(row, d));
  }
  return {out, pitch, source.num_rows};
}

/// Kᵀ [head_dim][keys], elements that are not finite 0.
FOVEA_AMX void load_columns(const TileSource& source, bool /*is_careful*/, void* buffer) {
  auto* const out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t pitch = column_pitch(source.num_rows);
  const RowReader reader{source.dtype, source.col_stride, source.num_cols};
  bool is_finite = true;
  for (std::int64_t key = 0; key < source.num_rows; key += kTileDepth) {
    const auto row = [&](std::int64_t i) {
      return key + i < source.num_rows ? source.row(key + i) : nullptr;
    };
    for (std::int64_t d = 0; d < source.num_cols; d += kBlock) {
      __m512i low[kVector];
      __m512i high[kVector];
      for (std::int64_t i = 0; i < kVector; ++i) {
        const Pairs pairs =
            interleave(without_non_finite(reader.read(row(2 * i), d), is_finite),
                       without_non_finite(reader.read(row(2 * i + 1), d), is_finite));
        low[i] = pairs.low;
        high[i] = pairs.high;
      }
      bf16::transpose_16x16(low);
      bf16::transpose_16x16(high);
      for (std::int64_t i = 0; i < kVector; ++i) {
        _mm512_store_si512(out + (d + i) * pitch + key, low[i]);
        _mm512_store_si512(out + (d + kVector + i) * pitch + key, high[i]);
      }
    }
  }
}

// ---- products ----

/// What a block of products reads: tiles of 16 rows `row_bytes` apart.
struct Operand {
  const std::byte* at;
  std::int64_t row_bytes;
  std::int64_t second;  // bytes from the first tile of the block to the second
  std::int64_t step;    // bytes to the next 32 summed elements
};

/// Tiles 0 to 3 += 32 rows of a x 32 columns of b; 4 to 7 hold the operands.
FOVEA_AMX_INLINE void multiply(const Operand& a, const Operand& b, std::int64_t num_steps) {
  const std::byte* x = a.at;
  const std::byte* y = b.at;
  for (std::int64_t i = 0; i < num_steps; ++i, x += a.step, y += b.step) {
    _tile_loadd(4, x, a.row_bytes);
    _tile_loadd(6, y, b.row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, y + b.second, b.row_bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + a.second, a.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

/// The block of sums at `at`, rows row_bytes apart.
FOVEA_AMX_INLINE void load_sums(const float* at, std::int64_t row_bytes) {
  const float* const second = at + kTileRows * row_bytes / 4;
  _tile_loadd(0, at, row_bytes);
  _tile_loadd(1, at + kVector, row_bytes);
  _tile_loadd(2, second, row_bytes);
  _tile_loadd(3, second + kVector, row_bytes);
}

FOVEA_AMX_INLINE void store_sums(float* at, std::int64_t row_bytes) {
  float* const second = at + kTileRows * row_bytes / 4;
  _tile_stored(0, at, row_bytes);
  _tile_stored(1, at + kVector, row_bytes);
  _tile_stored(2, second, row_bytes);
  _tile_stored(3, second + kVector, row_bytes);
}

/// Blocks of 32 lanes that hold these vectors.
constexpr std::int64_t num_blocks(int num_vectors) {
  return (num_vectors + kBlockVectors - 1) / kBlockVectors;
}

FOVEA_AMX void scores(const void* queries, const KeyTile& keys, KeyRange range,
                      std::int64_t head_dim, int num_vectors, float* out, NextTile& /*next*/) {
  const CompilerFence fence;
  const std::int64_t bytes = keys.row_stride * 2;
  const auto* const rows = static_cast<const std::byte*>(keys.data) + range.begin * bytes;
  const auto* const pairs = static_cast<const std::byte*>(queries);
  for (std::int64_t key = 0; key < range.count; key += kBlock) {
    for (std::int64_t block = 0; block < num_blocks(num_vectors); ++block) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      multiply({rows + key * bytes, bytes, kTileRows * bytes, kTileBytes},
               {pairs + block * kBlockBytes, kRowBytes, kTileBytes, kTileRows * kRowBytes},
               padded(head_dim) / kTileDepth);
      store_sums(out + key * kLanes + block * kBlock, kRowBytes);
    }
  }
}

FOVEA_AMX void accumulate_rows(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                               const void* rows, std::int64_t head_dim, float* sums) {
  const CompilerFence fence;
  const auto* const first = reinterpret_cast<const std::byte*>(weights);
  const auto* const pairs = static_cast<const std::byte*>(rows);
  const std::int64_t pair_bytes = padded(head_dim) * 4;
  const std::int64_t pitch = row_pitch(head_dim);
  for (std::int64_t key = 0; key < num_keys; key += kBlock) {
    for (std::int64_t d = 0; d < head_dim; d += kBlock) {
      float* const to = sums + key * pitch + d;
      load_sums(to, pitch * 4);
      multiply({first + key * kRowBytes, kRowBytes, kTileRows * kRowBytes, kBlockBytes},
               {pairs + d * 4, pair_bytes, kTileBytes, kTileRows * pair_bytes},
               padded(num_rows) / kTileDepth);
      store_sums(to, pitch * 4);
    }
  }
}

/// Gradients are not rescaled. Lanes of `out` are in the order of the pairs.
FOVEA_AMX void accumulate(const void* columns, std::int64_t tile_keys, KeyRange range,
                          const void* gradients, std::int64_t head_dim, int num_vectors,
                          const float* /*rescale*/, float* out, NextTile& /*next*/) {
  const CompilerFence fence;
  const std::int64_t bytes = column_pitch(tile_keys) * 2;
  const auto* const rows = static_cast<const std::byte*>(columns) + range.begin * 2;
  const auto* const pairs = static_cast<const std::byte*>(gradients) + kTileBytes;
  for (std::int64_t block = 0; block < num_blocks(num_vectors); ++block) {
    for (std::int64_t d = 0; d < head_dim; d += kBlock) {
      float* const to = out + d * kLanes + block * kBlock;
      load_sums(to, kRowBytes);
      multiply({rows + d * bytes, bytes, kTileRows * bytes, kTileBytes},
               {pairs + block * kBlockBytes, 2 * kRowBytes, kRowBytes, kTileDepth * kRowBytes},
               padded(range.count) / kTileDepth);
      store_sums(to, kRowBytes);
    }
  }
}

// ---- between the products ----

// As math-inl.hpp has it: 2^x for x <= 0, exactly 0 below -99.5, NaN for NaN. Degree 5 on [-1/2, 1/2], coefficients
// scaled by 2^27 and the power by 2^-27.
constexpr float kLowestPower = -100.0F;
constexpr float kRoundingShift = 12582912.0F;

constexpr __mmask16 kAll = 0xffff;

FOVEA_AMX_INLINE __m512 exp2_nonpositive(__mmask16 mask, __m512 x) {
  const __m512 shift = _mm512_set1_ps(kRoundingShift - kLowestPower);
  // The maximum is the second operand where one is NaN.
  const __m512 limited = _mm512_max_ps(_mm512_set1_ps(kLowestPower), x);
  const __m512 shifted = _mm512_add_ps(limited, shift);
  const __m512 f = _mm512_sub_ps(limited, _mm512_sub_ps(shifted, shift));
  const auto power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0x1.5bba14p+17F), _mm512_set1_ps(0x1.3cea88p+20F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p+22F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp+24F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap+26F));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1p+27F));
  return _mm512_maskz_mul_ps(mask, p, power);
}

/// Of a vector of lanes, in powers of two.
struct LaneTerms {
  __m512 origin, log_sum, delta;
  __mmask16 sees;
};

FOVEA_AMX_INLINE LaneTerms lane_terms(const SoftmaxGradient& step, int vector) {
  const std::int64_t lane = vector * kVector;
  const __m512 log_sum = _mm512_load_ps(step.log_sum + lane);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const bool exists = vector < step.num_vectors;
  return {_mm512_load_ps(step.origin + lane),
          _mm512_mul_ps(log_sum, _mm512_set1_ps(std::numbers::log2e_v<float>)),
          _mm512_mul_ps(_mm512_load_ps(step.delta + lane), _mm512_set1_ps(step.factor)),
          exists ? _mm512_cmp_ps_mask(log_sum, nothing, _CMP_NEQ_UQ) : __mmask16{0}};
}

/// P and dS of one key and 32 lanes, rounded.
struct KeyRow {
  __m512i weights, gradients;
};

/// Who makes a KeyRow from fp32: the softmax, or somebody who did it before.
enum class From { scores, results };

struct PassConstants {
  __m512 scale, factor, nothing;
};

template <From kFrom, bool kHasProducts>
FOVEA_AMX_INLINE KeyRow key_row(const float* scores, const float* products,
                                const LaneTerms (&terms)[kBlockVectors], const PassConstants& c) {
  __m512 p[kBlockVectors];
  __m512 ds[kBlockVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kBlockVectors; ++v) {
    const LaneTerms& t = terms[v];
    const __m512 s = _mm512_load_ps(scores + v * kVector);
    if constexpr (kFrom == From::results) {
      p[v] = _mm512_maskz_mov_ps(t.sees, s);
      ds[v] =
          kHasProducts ? _mm512_maskz_load_ps(t.sees, products + v * kVector) : _mm512_setzero_ps();
      continue;
    }
    const __mmask16 is_seen = _mm512_mask_cmp_ps_mask(t.sees, s, c.nothing, _CMP_NEQ_UQ);
    const __m512 x = _mm512_fmsub_ps(_mm512_sub_ps(s, t.origin), c.scale, t.log_sum);
    p[v] = exp2_nonpositive(is_seen, x);
    ds[v] = _mm512_setzero_ps();
    if constexpr (kHasProducts) {
      const __m512 dp = _mm512_load_ps(products + v * kVector);
      ds[v] = _mm512_maskz_mul_ps(is_seen, p[v], _mm512_fmsub_ps(dp, c.factor, t.delta));
    }
  }
  return {narrow(p[1], p[0]), narrow(ds[1], ds[0])};
}

/// Rows of two keys and 32 lanes, from fp32 to the layout of this file's essay.
template <bool kHasProducts>
FOVEA_AMX_INLINE void store_pair(const KeyRow& first, const KeyRow& second, float* scores,
                                 float* products) {
  _mm512_store_si512(scores, first.weights);
  _mm512_store_si512(scores + kLanes, second.weights);
  if constexpr (!kHasProducts) return;
  _mm512_store_si512(products, first.gradients);
  _mm512_store_si512(products + kVector, _mm512_unpacklo_epi16(first.gradients, second.gradients));
  _mm512_store_si512(products + kLanes, second.gradients);
  _mm512_store_si512(products + kLanes + kVector,
                     _mm512_unpackhi_epi16(first.gradients, second.gradients));
}

template <From kFrom, bool kHasProducts>
FOVEA_AMX void pass(const SoftmaxGradient& step) {
  const PassConstants constants{_mm512_set1_ps(step.scale * std::numbers::log2e_v<float>),
                                _mm512_set1_ps(step.factor),
                                _mm512_set1_ps(-std::numeric_limits<float>::infinity())};
  for (std::int64_t block = 0; block < num_blocks(step.num_vectors); ++block) {
    const int vector = static_cast<int>(block) * kBlockVectors;
    const LaneTerms terms[kBlockVectors] = {lane_terms(step, vector), lane_terms(step, vector + 1)};
    float* s = step.scores + block * kBlock;
    float* dp = kHasProducts ? step.products + block * kBlock : nullptr;
    const std::int64_t skip = kHasProducts ? 2 * kLanes : 0;
    std::int64_t key = 0;
    for (; key + 2 <= step.num_keys; key += 2, s += 2 * kLanes, dp += skip) {
      const KeyRow first = key_row<kFrom, kHasProducts>(s, dp, terms, constants);
      const float* const next = kHasProducts ? dp + kLanes : nullptr;
      const KeyRow second = key_row<kFrom, kHasProducts>(s + kLanes, next, terms, constants);
      store_pair<kHasProducts>(first, second, s, dp);
    }
    const KeyRow none{_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (; key < padded(step.num_keys); key += 2, s += 2 * kLanes, dp += skip) {
      const KeyRow last =
          key < step.num_keys ? key_row<kFrom, kHasProducts>(s, dp, terms, constants) : none;
      store_pair<kHasProducts>(last, none, s, dp);
    }
  }
}

void pack_gradients(const SoftmaxGradient& step) {
  step.products != nullptr ? pass<From::results, true>(step) : pass<From::results, false>(step);
}

void softmax_gradient(const SoftmaxGradient& step) {
  if (step.is_read_between || step.dropout.threshold > 0) {
    gradient_kernels(CpuTarget::avx512)->softmax_gradient(step);
    if (!step.is_read_between) pack_gradients(step);
    return;
  }
  step.products != nullptr ? pass<From::scores, true>(step) : pass<From::scores, false>(step);
}

/// Only what rows that are summed again need of it: their maximum and sum. Scores are left as they are.
FOVEA_AMX void softmax(float* scores, std::int64_t num_keys, int num_vectors, float scale_log2,
                       const PanelState& state, const PanelDropout& /*dropout*/) {
  const __m512 scale = _mm512_set1_ps(scale_log2);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int vector = 0; vector < num_vectors; ++vector) {
    const std::int64_t lane = vector * kVector;
    const __m512 before = _mm512_load_ps(state.row_max + lane);
    __m512 row_max = before;
    for (std::int64_t key = 0; key < num_keys; ++key)
      row_max = _mm512_max_ps(_mm512_load_ps(scores + key * kLanes + lane), row_max);
    const __mmask16 has_keys = _mm512_cmp_ps_mask(row_max, nothing, _CMP_NEQ_UQ);
    const __m512 origin = _mm512_maskz_mov_ps(has_keys, row_max);
    __m512 sum = _mm512_load_ps(state.row_sum + lane);
    sum = _mm512_mul_ps(
        sum, exp2_nonpositive(kAll, _mm512_mul_ps(_mm512_sub_ps(before, origin), scale)));
    for (std::int64_t key = 0; key < num_keys; ++key) {
      const __m512 s = _mm512_load_ps(scores + key * kLanes + lane);
      sum = _mm512_add_ps(sum,
                          exp2_nonpositive(kAll, _mm512_mul_ps(_mm512_sub_ps(s, origin), scale)));
    }
    _mm512_store_ps(state.row_max + lane, row_max);
    _mm512_store_ps(state.row_sum + lane, sum);
  }
}

FOVEA_AMX void scale(float* scores, std::int64_t num_keys, float factor) {
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < num_keys * kLanes; i += kVector)
    _mm512_store_ps(scores + i, _mm512_mul_ps(_mm512_load_ps(scores + i), f));
}

// ---- columns to rows ----

/// The lane of a column of pairs: unpacking takes four lanes of each eight in turn.
constexpr std::int64_t lane_of_pair(std::int64_t column) {
  const std::int64_t in_block = column % kBlock;
  const std::int64_t in_tile = in_block % kVector;
  return column - in_block + in_tile / 4 * 8 + in_block / kVector * 4 + in_tile % 4;
}
constexpr std::int64_t lane_in_order(std::int64_t column) { return column; }

/// to[row] += 16 elements, fewer at the end.
FOVEA_AMX_INLINE void add_to_row(__m512 x, std::int64_t count, std::int64_t stride, float* to) {
  if (stride == 1) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1);
    _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), x));
    return;
  }
  alignas(64) float elements[kVector];
  _mm512_store_ps(elements, x);
  for (std::int64_t i = 0; i < count; ++i) to[i * stride] += elements[i];
}

template <std::int64_t (*kLaneOf)(std::int64_t)>
FOVEA_AMX void add_columns(const float* columns, std::int64_t num_rows, std::int64_t count,
                           float* const* to, std::int64_t col_stride) {
  for (std::int64_t column = 0; column < padded(num_rows); column += kVector) {
    for (std::int64_t i = 0; i < count; i += kVector) {
      const std::int64_t size = std::min(kVector, count - i);
      __m512i block[kVector];
      for (std::int64_t k = 0; k < kVector; ++k) {
        block[k] = k < size ? _mm512_load_si512(columns + (i + k) * kLanes + column)
                            : _mm512_setzero_si512();
      }
      bf16::transpose_16x16(block);
      for (std::int64_t k = 0; k < kVector; ++k) {
        const std::int64_t row = kLaneOf(column + k);
        if (row >= num_rows) continue;
        add_to_row(_mm512_castsi512_ps(block[k]), size, col_stride, to[row] + i * col_stride);
      }
    }
  }
}

FOVEA_AMX_INLINE __m512 widened(__mmask16 mask, const std::byte* at) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/// Products of two bf16 are exact in fp32.
FOVEA_AMX double product(const GradientRow& a, const GradientRow& b, std::int64_t count) {
  const bool is_near =
      a.dtype == Dtype::bf16 && b.dtype == Dtype::bf16 && a.col_stride == 1 && b.col_stride == 1;
  if (!is_near) return gradient_kernels(CpuTarget::avx512)->product(a, b, count);
  __m512d sums[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (std::int64_t i = 0; i < count; i += kVector) {
    const auto mask = static_cast<__mmask16>((1U << std::min(kVector, count - i)) - 1);
    const __m512 x = _mm512_mul_ps(widened(mask, a.data + i * 2), widened(mask, b.data + i * 2));
    const __m512 high = _mm512_shuffle_f32x4(x, x, 0xee);
    sums[0] = _mm512_add_pd(sums[0], _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    sums[1] = _mm512_add_pd(sums[1], _mm512_cvtps_pd(_mm512_castps512_ps256(high)));
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(sums[0], sums[1]));
}

PanelKernels make_panel() {
  PanelKernels kernels = *panel_kernels(CpuTarget::avx512);
  kernels.lanes = kLanes;
  kernels.product = Dtype::bf16;
  kernels.start = amx::start;
  kernels.stop = amx::stop;
  kernels.query_bytes = query_bytes;
  kernels.key_bytes = key_bytes;
  kernels.value_bytes = column_bytes;
  kernels.score_bytes = score_bytes;
  kernels.output_bytes = output_bytes;
  kernels.pack_queries = pack_queries;
  kernels.load_keys = load_keys;
  kernels.load_values = load_columns;
  kernels.scores = scores;
  kernels.scale = scale;
  kernels.softmax = softmax;
  kernels.accumulate = accumulate;
  return kernels;
}

GradientKernels make_gradients() {
  GradientKernels kernels = *gradient_kernels(CpuTarget::avx512);
  kernels.row_pitch = row_pitch;
  kernels.row_bytes = row_bytes;
  kernels.product = product;
  kernels.pack_rows = pack_rows;
  kernels.softmax_gradient = softmax_gradient;
  kernels.pack_gradients = pack_gradients;
  kernels.accumulate_rows = accumulate_rows;
  kernels.add_columns = add_columns<lane_in_order>;
  kernels.add_queries = add_columns<lane_of_pair>;
  return kernels;
}

}  // namespace

const PanelKernels* gradient_panel_kernels_amx_bf16() {
  static const PanelKernels kernels = make_panel();
  return &kernels;
}

const GradientKernels* gradient_kernels_amx_bf16() {
  static const GradientKernels kernels = make_gradients();
  return &kernels;
}

}  // namespace fovea::cpu

#endif
