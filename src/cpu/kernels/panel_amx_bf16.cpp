// bf16 products by AMX: a tile instruction multiplies 16 rows by 16 lanes over 32 elements, sums in fp32.
//
//   Sᵀ[16 keys][16 lanes]  += K[16 keys][32 d] · Qᵀ pairs[16 pairs of d][16 lanes]
//   Oᵀ[16 d][16 lanes]     += Vᵀ[16 d][32 keys] · P pairs[16 pairs of keys][16 lanes]
// K is read where it lies (rows of bf16); V is transposed once per tile and item; Q and P are the pairs of panel_bf16.hpp,
// which is just what the second operand of the instruction wants.
//
// Bound: 1024 flops per cycle in the tile unit against 16 scores per 9 cycles in the vector unit: at head_dim 128 products
// and softmax take equally long, so the tile rate cannot exceed one half unless the two overlap.
// Registers: six sums (2 rows of tiles x 48 lanes), one tile of each operand; tiles are released at the end of each work item,
// since leftover tile state slows context switches.
#include "cpu/kernels/panel.hpp"

#if defined(__x86_64__)

#include <atomic>

#include "cpu/kernels/panel_bf16.hpp"

#define FOVEA_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))

namespace fovea::cpu {
namespace {

using bf16::aligned_bytes;
using bf16::kLanes;
using bf16::round_up;

constexpr std::int64_t kTileRows = 16;   // rows of a tile, and fp32 lanes in one
constexpr std::int64_t kTileDepth = 32;  // bf16 elements of a tile's row
constexpr std::int64_t kLaneBytes = kLanes * 4;

/// Intel SDM vol. 1, 18.3: eight tiles of 16 rows x 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Once per work item: a configuration and its release take as long as 10 tile products.
///
/// Note: the compilers' tile intrinsics do not say what memory they touch: GCC 12 took the stores into a configuration on the
/// stack for dead. Hence a constant, and CompilerFence around all tile instructions.
FOVEA_AMX void start() {
  static constexpr TileConfig kConfig{};
  _tile_loadconfig(&kConfig);
}
FOVEA_AMX void stop() { _tile_release(); }

/// What was written before is in memory for the tile instructions of this scope, and what they write for the code behind it.
class CompilerFence {
 public:
  CompilerFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }
  ~CompilerFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }
  CompilerFence(const CompilerFence&) = delete;
  CompilerFence& operator=(const CompilerFence&) = delete;
};

std::size_t query_bytes(std::int64_t head_dim) {
  return aligned_bytes(round_up(head_dim, kTileDepth) * kLanes * 2);
}
std::size_t key_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return aligned_bytes(round_up(tile_kv, kTileRows) * round_up(head_dim, kTileDepth) * 2);
}
/// Elements from one row of Vᵀ to the next; a cache line more than the keys, so that rows do not share one cache set.
constexpr std::int64_t value_pitch(std::int64_t num_keys) {
  return round_up(num_keys, kTileDepth) + 32;
}
/// Vᵀ, and a row pair to convert into.
std::size_t value_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  const std::int64_t padded = round_up(head_dim, 2 * kTileRows);
  return aligned_bytes(padded * value_pitch(tile_kv) * 2) + aligned_bytes(kTileDepth * padded * 2);
}
/// The pairs of probabilities overwrite scores: rows up to a multiple of the depth.
std::size_t score_bytes(std::int64_t tile_kv) {
  return aligned_bytes(round_up(tile_kv, kTileDepth) * kLaneBytes);
}
std::size_t output_bytes(std::int64_t head_dim) {
  return aligned_bytes(round_up(head_dim, 2 * kTileRows) * kLaneBytes);
}

void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                  std::int64_t head_dim, void* queries) {
  bf16::pack_queries(rows, dtype, col_stride, head_dim, round_up(head_dim, kTileDepth), queries);
}

KeyTile load_keys(const TileSource& source, void* buffer) {
  const bool is_ready = source.dtype == Dtype::bf16 && source.col_stride == 1 &&
                        source.num_cols % kTileDepth == 0 && source.num_rows % kTileRows == 0;
  if (is_ready) return {source.data, source.row_stride, source.num_rows};
  auto* out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, kTileDepth);
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t key = 0; key < source.num_rows; ++key) {
    bf16::convert_row(source.data + key * row_bytes, source.dtype, source.col_stride,
                      source.num_cols, padded, out + key * padded);
  }
  std::fill(out + source.num_rows * padded, out + round_up(source.num_rows, kTileRows) * padded,
            std::uint16_t{0});
  return {out, padded, source.num_rows};
}

/// Rows 2i and 2i + 1, 16 columns from `d`: the pairs (key, key + 1) of each column.
FOVEA_AMX inline __m512i interleave_rows(const std::uint16_t* first, const std::uint16_t* second) {
  const __m512i a =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
  const __m512i b =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
  return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

/// Values as Vᵀ [head_dim][keys], zeros behind both; 32 keys at a time.
FOVEA_AMX void load_values(const TileSource& source, bool is_careful, void* buffer) {
  auto* out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, 2 * kTileRows);
  const std::int64_t pitch = value_pitch(source.num_rows);
  std::uint16_t* rows = out + padded * pitch;  // [32][padded], see value_bytes
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t begin = 0; begin < source.num_rows; begin += kTileDepth) {
    const std::int64_t count = std::min(kTileDepth, source.num_rows - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint16_t* row = rows + i * padded;
      bf16::convert_row(source.data + (begin + i) * row_bytes, source.dtype, source.col_stride,
                        source.num_cols, padded, row);
      if (is_careful) bf16::zero_non_finite(row, source.num_cols);
    }
    std::fill(rows + count * padded, rows + kTileDepth * padded, std::uint16_t{0});
    for (std::int64_t d = 0; d < padded; d += kTileRows) {
      __m512i block[16];
      for (int i = 0; i < 16; ++i) {
        block[i] = interleave_rows(rows + 2 * i * padded + d, rows + (2 * i + 1) * padded + d);
      }
      bf16::transpose_16x16(block);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (d + i) * pitch + begin, block[i]);
    }
  }
}

/// What a product reads: rows of the first operand, 2 x 16 of them, and pairs of the second.
struct Operands {
  const std::byte* rows;
  std::int64_t row_bytes;
  const std::byte* pairs;  // [depth / 2][kLanes]
  std::int64_t depth;      // summed elements, a multiple of kTileDepth
};

/// Tiles 0, 1, 2 += 16 rows x 48 lanes; tiles 6 and 7 hold the operands.
///
/// Note: rows are loaded with the hint that they will not be needed soon: measured 1.2 to 1.4 times faster than plain loads with
/// a prefetch of the next rows (which takes the load ports), because sums, queries and scores stay in the first-level cache.
#define FOVEA_MULTIPLY_ROWS(sum0, sum1, sum2, rows_at, pairs_at, row_bytes) \
  _tile_stream_loadd(6, rows_at, row_bytes);                                \
  _tile_loadd(7, pairs_at, kLaneBytes);                                     \
  _tile_dpbf16ps(sum0, 6, 7);                                               \
  _tile_loadd(7, (pairs_at) + 64, kLaneBytes);                              \
  _tile_dpbf16ps(sum1, 6, 7);                                               \
  _tile_loadd(7, (pairs_at) + 128, kLaneBytes);                             \
  _tile_dpbf16ps(sum2, 6, 7)

FOVEA_AMX inline void multiply_32_rows(const Operands& o) {
  for (std::int64_t i = 0; i < o.depth; i += kTileDepth) {
    const std::byte* rows = o.rows + i * 2;
    const std::byte* pairs = o.pairs + i / 2 * kLaneBytes;
    FOVEA_MULTIPLY_ROWS(0, 1, 2, rows, pairs, o.row_bytes);
    FOVEA_MULTIPLY_ROWS(3, 4, 5, rows + kTileRows * o.row_bytes, pairs, o.row_bytes);
  }
}

FOVEA_AMX inline void multiply_16_rows(const Operands& o) {
  for (std::int64_t i = 0; i < o.depth; i += kTileDepth) {
    FOVEA_MULTIPLY_ROWS(0, 1, 2, o.rows + i * 2, o.pairs + i / 2 * kLaneBytes, o.row_bytes);
  }
}

FOVEA_AMX inline void store_rows(float* out) {
  _tile_stored(0, out, kLaneBytes);
  _tile_stored(1, out + 16, kLaneBytes);
  _tile_stored(2, out + 32, kLaneBytes);
}

FOVEA_AMX void scores(const void* queries, const KeyTile& keys, KeyRange range,
                      std::int64_t head_dim, int /*num_vectors*/, float* out, NextTile& next) {
  const CompilerFence fence;
  const auto* rows = static_cast<const std::byte*>(keys.data) + range.begin * keys.row_stride * 2;
  Operands o{rows, keys.row_stride * 2, static_cast<const std::byte*>(queries),
             round_up(head_dim, kTileDepth)};
  const std::int64_t num_rows = round_up(range.count, kTileRows);
  for (std::int64_t key = 0; key < num_rows; key += 2 * kTileRows) {
    o.rows = rows + key * o.row_bytes;
    float* to = out + key * kLanes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if (key + kTileRows < num_rows) {
      _tile_zero(3);
      _tile_zero(4);
      _tile_zero(5);
      multiply_32_rows(o);
      float* second = to + kTileRows * kLanes;
      _tile_stored(3, second, kLaneBytes);
      _tile_stored(4, second + 16, kLaneBytes);
      _tile_stored(5, second + 32, kLaneBytes);
    } else {
      multiply_16_rows(o);
    }
    store_rows(to);
    next.fetch();
  }
}

void softmax(float* scores, std::int64_t num_keys, int num_vectors, float scale_log2,
             const PanelState& state, const PanelDropout& dropout) {
  panel_kernels(CpuTarget::avx512)
      ->softmax(scores, num_keys, num_vectors, scale_log2, state, dropout);
  bf16::pack_probabilities(scores, num_keys, round_up(num_keys, kTileDepth));
}

/// Oᵀ *= rescale, unless no maximum moved: the common case after the first tiles.
FOVEA_AMX void rescale_rows(std::int64_t head_dim, const float* rescale, float* out) {
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 factor[3] = {_mm512_load_ps(rescale), _mm512_load_ps(rescale + 16),
                            _mm512_load_ps(rescale + 32)};
  const auto differs = [&](int i)
                           FOVEA_AMX { return _mm512_cmp_ps_mask(factor[i], one, _CMP_NEQ_UQ); };
  if ((differs(0) | differs(1) | differs(2)) == 0) return;
  for (std::int64_t d = 0; d < head_dim; ++d) {
    for (int i = 0; i < 3; ++i) {
      float* at = out + d * kLanes + i * 16;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor[i]));
    }
  }
}

FOVEA_AMX void accumulate(const void* values, std::int64_t tile_keys, KeyRange range,
                          const void* probabilities, std::int64_t head_dim, int /*num_vectors*/,
                          const float* rescale, float* out, NextTile& next) {
  rescale_rows(head_dim, rescale, out);
  const CompilerFence fence;
  const auto* rows = static_cast<const std::byte*>(values) + range.begin * 2;
  Operands o{rows, value_pitch(tile_keys) * 2, static_cast<const std::byte*>(probabilities),
             round_up(range.count, kTileDepth)};
  for (std::int64_t d = 0; d < head_dim; d += 2 * kTileRows) {
    o.rows = rows + d * o.row_bytes;
    float* to = out + d * kLanes;
    float* second = to + kTileRows * kLanes;
    _tile_loadd(0, to, kLaneBytes);
    _tile_loadd(1, to + 16, kLaneBytes);
    _tile_loadd(2, to + 32, kLaneBytes);
    _tile_loadd(3, second, kLaneBytes);
    _tile_loadd(4, second + 16, kLaneBytes);
    _tile_loadd(5, second + 32, kLaneBytes);
    multiply_32_rows(o);
    store_rows(to);
    _tile_stored(3, second, kLaneBytes);
    _tile_stored(4, second + 16, kLaneBytes);
    _tile_stored(5, second + 32, kLaneBytes);
    next.fetch();
  }
}

#undef FOVEA_MULTIPLY_ROWS

PanelKernels make_kernels() {
  PanelKernels kernels = *panel_kernels(CpuTarget::avx512);
  kernels.key_block = 2 * kTileRows;
  kernels.value_block = 2 * kTileRows;
  kernels.product = Dtype::bf16;
  // Vector loads of scores that tile instructions have just stored wait for them: 0.4 us a step. So something comes between.
  kernels.scores_ahead = true;
  kernels.start = start;
  kernels.stop = stop;
  kernels.query_bytes = query_bytes;
  kernels.key_bytes = key_bytes;
  kernels.value_bytes = value_bytes;
  kernels.score_bytes = score_bytes;
  kernels.output_bytes = output_bytes;
  kernels.pack_queries = pack_queries;
  kernels.load_keys = load_keys;
  kernels.load_values = load_values;
  kernels.scores = scores;
  kernels.softmax = softmax;
  kernels.accumulate = accumulate;
  return kernels;
}

}  // namespace

const PanelKernels* panel_kernels_amx_bf16() {
  static const PanelKernels kernels = make_kernels();
  return &kernels;
}

}  // namespace fovea::cpu

#endif
