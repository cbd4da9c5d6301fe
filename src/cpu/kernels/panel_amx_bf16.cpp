// Panels by AMX: a tile instruction multiplies 16 rows by 16 lanes over 32 bf16 elements and sums in fp32.
//
//   Sᵀ[16 keys][16 lanes]  += K[16 keys][32 d] · Qᵀ pairs[16 pairs of d][16 lanes]
//   Oᵀ[16 d][16 lanes]     += Vᵀ[16 d][32 keys] · P pairs[16 pairs of keys][16 lanes]
// K is read where it lies (rows of bf16); V is transposed once per tile and item; Q and P are the pairs of
// panel_bf16.hpp, which is just what the second operand of the instruction wants.
//
// An f16 number is the sum of two bf16, exactly: 11 significant bits of 8 + 8, and bf16 reaches further at both ends. A
// probability is the sum of three. So f16 goes through the same tiles part by part, and what comes out is a sum of
// exact products in fp32, as from fp32 kernels. (Infinities meet parts that are 0 and become NaN: such rows are
// computed again, in fp32.)
//
// Bound: 1024 flops per cycle in the tile unit against 16 scores per 8 cycles in the vector unit: at head_dim 128
// products and softmax take equally long. So the two overlap: Pipeline::turn. And the second-level cache: whatever of
// K, V, Oᵀ and scores does not stay in the first one comes at 1.5 to 2 cycles a line, which is why scores live for two
// strips of 32 keys only.
#include "cpu/kernels/panel.hpp"

#if defined(__x86_64__)

#include <algorithm>
#include <limits>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/panel_amx_softmax.hpp"
#include "cpu/kernels/panel_amx_tiles.hpp"
#include "cpu/kernels/panel_bf16.hpp"
#include "problem/head_dim.hpp"

namespace fovea::cpu {
namespace {

using amx::CompilerFence;
using amx::kJobRows;
using amx::kLaneBytes;
using amx::kLanes;
using amx::kStripKeys;
using amx::kStripPairs;
using amx::kTileDepth;
using amx::kTileRows;
using amx::NoWork;
using amx::StripSoftmax;
using amx::TileJob;
using bf16::aligned_bytes;
using bf16::round_up;

/// kInputParts bf16 numbers make an element of Q, K and V.
template <int kInputParts>
struct Layout {
  static constexpr int kProbabilityParts = kInputParts == 1 ? 1 : 3;

  // Bytes of one part.
  static constexpr std::int64_t query_part(std::int64_t head_dim) {
    return round_up(head_dim, kTileDepth) * kLanes * 2;
  }
  static constexpr std::int64_t key_part(std::int64_t num_keys, std::int64_t head_dim) {
    return round_up(num_keys, kStripKeys) * round_up(head_dim, kTileDepth) * 2;
  }
  /// Elements from one row of Vᵀ to the next; a cache line more than the keys, so that rows do not share one cache set.
  static constexpr std::int64_t value_pitch(std::int64_t num_keys) {
    return round_up(num_keys, kTileDepth) + 32;
  }
  static constexpr std::int64_t value_part(std::int64_t num_keys, std::int64_t head_dim) {
    return round_up(head_dim, kJobRows) * value_pitch(num_keys) * 2;
  }
  static constexpr std::int64_t pair_part(std::int64_t num_keys) {
    return round_up(num_keys, kTileDepth) / 2 * kLaneBytes;
  }
  static constexpr std::int64_t scores(std::int64_t num_keys) {
    return round_up(num_keys, kTileDepth) * kLaneBytes;
  }

  static std::size_t query_bytes(std::int64_t head_dim) {
    return aligned_bytes(kInputParts * query_part(head_dim));
  }
  static std::size_t key_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
    return aligned_bytes(kInputParts * key_part(tile_kv, head_dim));
  }
  /// Vᵀ, and kTileDepth rows to convert into.
  static std::size_t value_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
    const std::int64_t rows = kTileDepth * round_up(head_dim, kJobRows) * 2;
    return aligned_bytes(kInputParts * (value_part(tile_kv, head_dim) + rows));
  }
  /// Pairs of probabilities in one part overwrite scores; several parts lie behind them.
  static std::size_t score_bytes(std::int64_t tile_kv) {
    return aligned_bytes(scores(tile_kv) +
                         (kInputParts == 1 ? 0 : kProbabilityParts * pair_part(tile_kv)));
  }
  static const std::byte* pairs_of(const void* scores_at, std::int64_t num_keys) {
    return static_cast<const std::byte*>(scores_at) + (kInputParts == 1 ? 0 : scores(num_keys));
  }
};

std::size_t output_bytes(std::int64_t head_dim) {
  return aligned_bytes(round_up(head_dim, kJobRows) * kLaneBytes);
}

// ---- rows in parts ----

/// 32 neighbouring f16 numbers as bf16 and what that leaves of them.
struct SplitVector {
  __m512i high, low;
};

FOVEA_AMX_INLINE __m512 widened(__m256i part) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
}

FOVEA_AMX_INLINE SplitVector split_vector(const void* from) {
  const __m512i halves = _mm512_loadu_si512(from);
  const __m512 x = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  const __m512 y = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  const auto high = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x));
  const __m512 rest_x = _mm512_sub_ps(x, widened(_mm512_castsi512_si256(high)));
  const __m512 rest_y = _mm512_sub_ps(y, widened(_mm512_extracti64x4_epi64(high, 1)));
  return {high, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(rest_y, rest_x))};
}

/// `count` elements of a row, then zeros up to `padded`; parts are part_stride elements apart.
template <int kInputParts>
FOVEA_AMX void convert_row(const std::byte* row, Dtype dtype, std::int64_t col_stride,
                           std::int64_t count, std::int64_t padded, std::uint16_t* out,
                           std::int64_t part_stride) {
  if constexpr (kInputParts == 1) {
    bf16::convert_row(row, dtype, col_stride, count, padded, out);
  } else {
    std::int64_t i = 0;
    if (dtype == Dtype::f16 && col_stride == 1) {
      for (; i + 32 <= count; i += 32) {
        const SplitVector split = split_vector(row + i * 2);
        _mm512_storeu_si512(out + i, split.high);
        _mm512_storeu_si512(out + part_stride + i, split.low);
      }
    }
    for (; i < count; ++i) {
      const float x = load_scalar(row, dtype, i * col_stride);
      const bfloat16 high(x);
      out[i] = high.bits;
      out[part_stride + i] = bfloat16(x - static_cast<float>(high)).bits;
    }
    std::fill(out + count, out + padded, std::uint16_t{0});
    std::fill(out + part_stride + count, out + part_stride + padded, std::uint16_t{0});
  }
}

/// Rows of f16 that lie side by side, head_dim a multiple of 32.
FOVEA_AMX void pack_near_halves(const std::byte* const* rows, std::int64_t head_dim,
                                std::uint32_t* out, std::int64_t part_stride) {
  for (std::int64_t lane = 0; lane < kLanes; lane += 16) {
    for (std::int64_t i = 0; i < head_dim; i += 32) {
      __m512i high[16], low[16];
      for (std::int64_t r = 0; r < 16; ++r) {
        const std::byte* row = rows[lane + r];
        const SplitVector split = row == nullptr
                                      ? SplitVector{_mm512_setzero_si512(), _mm512_setzero_si512()}
                                      : split_vector(row + i * 2);
        high[r] = split.high;
        low[r] = split.low;
      }
      bf16::transpose_16x16(high);
      bf16::transpose_16x16(low);
      for (std::int64_t r = 0; r < 16; ++r) {
        std::uint32_t* to = out + (i / 2 + r) * kLanes + lane;
        _mm512_store_si512(to, high[r]);
        _mm512_store_si512(to + part_stride, low[r]);
      }
    }
  }
}

template <int kInputParts>
FOVEA_AMX void pack_queries(const std::byte* const* rows, Dtype dtype, std::int64_t col_stride,
                            std::int64_t head_dim, void* queries) {
  const std::int64_t padded = round_up(head_dim, kTileDepth);
  if constexpr (kInputParts == 1) {
    bf16::pack_queries(rows, dtype, col_stride, head_dim, padded, queries);
  } else {
    auto* out = static_cast<std::uint32_t*>(queries);
    const std::int64_t part_stride = Layout<kInputParts>::query_part(head_dim) / 4;
    if (dtype == Dtype::f16 && col_stride == 1 && head_dim == padded) {
      pack_near_halves(rows, head_dim, out, part_stride);
      return;
    }
    constexpr std::int64_t kMaxPadded = kMaxHeadDim + kTileDepth;
    std::uint16_t row[kInputParts * kMaxPadded];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      if (rows[lane] == nullptr) {
        std::fill_n(row, kInputParts * kMaxPadded, std::uint16_t{0});
      } else {
        convert_row<kInputParts>(rows[lane], dtype, col_stride, head_dim, padded, row, kMaxPadded);
      }
      for (int part = 0; part < kInputParts; ++part) {
        const std::uint16_t* from = row + part * kMaxPadded;
        for (std::int64_t i = 0; i < padded; i += 2) {
          out[part * part_stride + i / 2 * kLanes + lane] =
              from[i] | static_cast<std::uint32_t>(from[i + 1]) << 16U;
        }
      }
    }
  }
}

/// Rows in the caller's memory that the tile instructions can read.
bool is_ready(const TileSource& source) {
  return source.dtype == Dtype::bf16 && source.col_stride == 1 &&
         source.num_cols % kTileDepth == 0 && source.num_rows % kStripKeys == 0;
}

template <int kInputParts>
KeyTile load_keys(const TileSource& source, void* buffer) {
  if (kInputParts == 1 && is_ready(source))
    return {source.data, source.row_stride, source.num_rows};
  auto* out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, kTileDepth);
  const std::int64_t part_stride =
      Layout<kInputParts>::key_part(source.num_rows, source.num_cols) / 2;
  for (std::int64_t key = 0; key < source.num_rows; ++key) {
    convert_row<kInputParts>(source.row(key), source.dtype, source.col_stride, source.num_cols,
                             padded, out + key * padded, part_stride);
  }
  for (int part = 0; part < kInputParts; ++part) {
    std::uint16_t* at = out + part * part_stride;
    std::fill(at + source.num_rows * padded, at + part_stride, std::uint16_t{0});
  }
  return {out, padded, source.num_rows};
}

/// Rows of V [32][32] become columns: pairs of rows first, then 16 x 16 pairs at a time.
FOVEA_AMX void transpose_block(const std::byte* from, std::int64_t row_bytes, std::uint16_t* out,
                               std::int64_t pitch) {
  __m512i low[16], high[16];
  for (int i = 0; i < 16; ++i) {
    const __m512i first = _mm512_loadu_si512(from + 2 * i * row_bytes);
    const __m512i second = _mm512_loadu_si512(from + (2 * i + 1) * row_bytes);
    low[i] = _mm512_unpacklo_epi16(first, second);
    high[i] = _mm512_unpackhi_epi16(first, second);
  }
  bf16::transpose_16x16(low);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (i / 4 * 8 + i % 4) * pitch, low[i]);
  bf16::transpose_16x16(high);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (i / 4 * 8 + 4 + i % 4) * pitch, high[i]);
}

/// Values as Vᵀ [head_dim][keys], zeros behind both; 32 keys at a time.
template <int kInputParts>
FOVEA_AMX void load_values(const TileSource& source, bool is_careful, void* buffer) {
  auto* out = static_cast<std::uint16_t*>(buffer);
  const std::int64_t padded = round_up(source.num_cols, kJobRows);
  const std::int64_t pitch = Layout<kInputParts>::value_pitch(source.num_rows);
  const std::int64_t part_stride =
      Layout<kInputParts>::value_part(source.num_rows, source.num_cols) / 2;
  std::uint16_t* const rows = out + kInputParts * part_stride;  // [parts][32][padded]
  const std::int64_t rows_part = kTileDepth * padded;
  const bool reads_in_place = kInputParts == 1 && !is_careful && is_ready(source);
  for (std::int64_t begin = 0; begin < source.num_rows; begin += kTileDepth) {
    const auto* from = reinterpret_cast<const std::byte*>(rows);
    std::int64_t row_bytes = padded * 2;
    if (reads_in_place) {
      from = source.row(begin);
      row_bytes = source.row_bytes();
    } else {
      const std::int64_t count = std::min(kTileDepth, source.num_rows - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        std::uint16_t* row = rows + i * padded;
        convert_row<kInputParts>(source.row(begin + i), source.dtype, source.col_stride,
                                 source.num_cols, padded, row, rows_part);
        for (int part = 0; is_careful && part < kInputParts; ++part)
          bf16::zero_non_finite(row + part * rows_part, source.num_cols);
      }
      for (int part = 0; part < kInputParts; ++part) {
        std::uint16_t* at = rows + part * rows_part;
        std::fill(at + count * padded, at + rows_part, std::uint16_t{0});
      }
    }
    for (int part = 0; part < kInputParts; ++part) {
      for (std::int64_t d = 0; d < padded; d += 32) {
        transpose_block(from + (part * rows_part + d) * 2, row_bytes,
                        out + part * part_stride + d * pitch + begin, pitch);
      }
    }
  }
}

// ---- jobs for the tile unit ----

/// Scores of kStripKeys keys from `begin` on.
template <int kInputParts>
TileJob score_job(const void* queries, const KeyTile& keys, std::int64_t begin,
                  std::int64_t head_dim, float* scores) {
  const std::int64_t row_bytes = keys.row_stride * 2;
  return {.rows = static_cast<const std::byte*>(keys.data) + begin * row_bytes,
          .row_bytes = row_bytes,
          .row_part_bytes = Layout<kInputParts>::key_part(keys.num_keys, head_dim),
          .pairs = static_cast<const std::byte*>(queries),
          .pair_part_bytes = Layout<kInputParts>::query_part(head_dim),
          .depth = round_up(head_dim, kTileDepth),
          .pair_parts = kInputParts,
          .sums = scores,
          .adds = false};
}

/// kJobRows rows of Oᵀ from d on. Parts of the probabilities lie pair_part_bytes apart.
template <int kInputParts>
TileJob value_job(const void* values, std::int64_t tile_keys, KeyRange range,
                  const std::byte* pairs, std::int64_t pair_part_bytes, std::int64_t head_dim,
                  std::int64_t d, float* out) {
  const std::int64_t row_bytes = Layout<kInputParts>::value_pitch(tile_keys) * 2;
  return {.rows = static_cast<const std::byte*>(values) + d * row_bytes + range.begin * 2,
          .row_bytes = row_bytes,
          .row_part_bytes = Layout<kInputParts>::value_part(tile_keys, head_dim),
          .pairs = pairs,
          .pair_part_bytes = pair_part_bytes,
          .depth = round_up(range.count, kTileDepth),
          .pair_parts = Layout<kInputParts>::kProbabilityParts,
          .sums = out + d * kLanes,
          .adds = true};
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

// ---- step by step ----

template <int kInputParts>
FOVEA_AMX void scores(const void* queries, const KeyTile& keys, KeyRange range,
                      std::int64_t head_dim, int /*num_vectors*/, float* out, NextTile& next) {
  const CompilerFence fence;
  NoWork none;
  for (std::int64_t key = 0; key < range.count; key += kStripKeys) {
    amx::run_job<kInputParts>(
        score_job<kInputParts>(queries, keys, range.begin + key, head_dim, out + key * kLanes),
        none);
    next.fetch();
  }
}

/// Of probabilities in one part.
void pack_probabilities(float* probabilities, std::int64_t num_keys) {
  bf16::pack_probabilities(probabilities, num_keys, round_up(num_keys, kTileDepth));
}

template <int kInputParts>
FOVEA_AMX void softmax(float* scores, std::int64_t num_keys, int num_vectors, float scale_log2,
                       const PanelState& state, const PanelDropout& dropout) {
  panel_kernels(CpuTarget::avx512)
      ->softmax(scores, num_keys, num_vectors, scale_log2, state, dropout);
  if constexpr (kInputParts == 1) {
    pack_probabilities(scores, num_keys);
  } else {
    const std::int64_t padded = round_up(num_keys, kTileDepth);
    std::fill(scores + num_keys * kLanes, scores + padded * kLanes, 0.0F);
    auto* pairs = reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(scores) +
                                                   Layout<kInputParts>::scores(num_keys));
    for (std::int64_t key = 0; key < padded; key += 2) {
      for (std::int64_t lane = 0; lane < kLanes; lane += 16) {
        const float* at = scores + key * kLanes + lane;
        amx::store_pairs<Layout<kInputParts>::kProbabilityParts>(
            _mm512_load_ps(at), _mm512_load_ps(at + kLanes), pairs + key / 2 * kLanes + lane,
            Layout<kInputParts>::pair_part(num_keys) / 4);
      }
    }
  }
}

template <int kInputParts>
FOVEA_AMX void accumulate(const void* values, std::int64_t tile_keys, KeyRange range,
                          const void* probabilities, std::int64_t head_dim, int /*num_vectors*/,
                          const float* rescale, float* out, NextTile& next) {
  rescale_rows(head_dim, rescale, out);
  const CompilerFence fence;
  NoWork none;
  const std::byte* pairs = Layout<kInputParts>::pairs_of(probabilities, range.count);
  for (std::int64_t d = 0; d < head_dim; d += kJobRows) {
    amx::run_job<kInputParts>(
        value_job<kInputParts>(values, tile_keys, range, pairs,
                               Layout<kInputParts>::pair_part(range.count), head_dim, d, out),
        none);
    next.fetch();
  }
}

// ---- all at once ----

/// Three panels are on their way together: while the vector unit works on the strips of one, the tile unit multiplies
/// that one's next strip, the first strip of the panel behind it, and the probabilities of the panel before it.
///
/// A strip's probabilities are taken before the scores of the next one are known, relative to the origins that the row
/// has. Where a maximum has grown too much for that, and in a row's first tile, all scores come first.
template <int kInputParts>
class Pipeline {
 public:
  static std::size_t bytes(std::int64_t tile_kv) {
    return static_cast<std::size_t>(kAllScores + Layouts::scores(tile_kv) + 2 * pairs(tile_kv));
  }

  static FOVEA_AMX void push(PanelPipeline& p, const PanelTurn& turn, NextTile& next) {
    if (p.has_current) {
      run_turn(p, &turn, next);
    } else {
      p.has_first_strip = false;
    }
    p.current = turn;
    p.has_current = true;
  }

  static FOVEA_AMX void flush(PanelPipeline& p, NextTile& next) {
    if (!p.has_current) return;
    run_turn(p, nullptr, next);
    add_values(p, next);
    p.has_current = false;
  }

 private:
  using Layouts = Layout<kInputParts>;
  using Softmax = StripSoftmax<Layouts::kProbabilityParts>;

  // Memory: two strips of scores, a tile of scores, pairs of two panels.
  static constexpr std::int64_t kStripFloats = kStripKeys * kLanes;
  static constexpr std::int64_t kAllScores = 2 * kStripFloats * 4;

  static std::int64_t pairs(std::int64_t tile_kv) {
    return Layouts::kProbabilityParts * Layouts::pair_part(tile_kv);
  }
  static float* strip(const PanelPipeline& p, std::int64_t index) {
    return reinterpret_cast<float*>(p.memory) + index % 2 * kStripFloats;
  }
  static float* all_scores(const PanelPipeline& p) {
    return reinterpret_cast<float*>(p.memory + kAllScores);
  }
  static std::byte* pairs_of(const PanelPipeline& p, int turn) {
    return p.memory + kAllScores + Layouts::scores(p.tile_kv) + turn % 2 * pairs(p.tile_kv);
  }
  static std::int64_t num_strips(const PanelTurn& turn) {
    return round_up(turn.range.count, kStripKeys) / kStripKeys;
  }

  static TileJob strip_job(const PanelPipeline& p, const PanelTurn& turn, std::int64_t index,
                           float* to) {
    return score_job<kInputParts>(turn.queries, turn.keys, turn.range.begin + index * kStripKeys,
                                  p.head_dim_qk, to);
  }
  static TileJob block_job(const PanelPipeline& p, std::int64_t block) {
    const PanelTurn& turn = p.prior;
    return value_job<kInputParts>(turn.values, turn.keys.num_keys, turn.range,
                                  pairs_of(p, p.num_turns + 1), Layouts::pair_part(p.tile_kv),
                                  p.head_dim_v, block * kJobRows, turn.out);
  }
  static std::int64_t num_blocks(const PanelPipeline& p) {
    return p.has_prior ? round_up(p.head_dim_v, kJobRows) / kJobRows : 0;
  }

  /// Vᵀ P of the panel before, with nothing beside it.
  static FOVEA_AMX void add_values(PanelPipeline& p, NextTile& next) {
    const CompilerFence fence;
    NoWork none;
    for (std::int64_t block = 0; block < num_blocks(p); ++block) {
      amx::run_job<kInputParts>(block_job(p, block), none);
      next.fetch();
    }
    p.has_prior = false;
  }

  /// Scores of a strip as the softmax wants them: programs applied, keys behind the last one hidden.
  static FOVEA_AMX_INLINE void prepare(const PanelTurn& turn, std::int64_t index, float* strip_at) {
    const std::int64_t begin = index * kStripKeys;
    const std::int64_t count = std::min(kStripKeys, turn.range.count - begin);
    if ((turn.prepared >> index & 1U) != 0)
      turn.prepare(turn, {turn.range.begin + begin, count}, strip_at);
    if (count < kStripKeys) {
      std::fill(strip_at + count * kLanes, strip_at + kStripFloats,
                -std::numeric_limits<float>::infinity());
    }
  }

  /// All scores of the current panel, and origins that suit them.
  static FOVEA_AMX void take_scores(const PanelPipeline& p, NextTile& next) {
    const PanelTurn& turn = p.current;
    float* const to = all_scores(p);
    scores<kInputParts>(turn.queries, turn.keys, turn.range, p.head_dim_qk, 0, to, next);
    for (std::int64_t i = 0; i < num_strips(turn); ++i) prepare(turn, i, to + i * kStripFloats);
    amx::move_origins(to, turn.range.count, p.scale_log2, turn.state);
    rescale_rows(p.head_dim_v, turn.state.rescale, turn.out);
  }

  static FOVEA_AMX void run_turn(PanelPipeline& p, const PanelTurn* behind, NextTile& next) {
    const PanelTurn& turn = p.current;
    const bool has_scores = !amx::has_origins(turn.state);
    if (has_scores) {
      take_scores(p, next);
    } else if (!p.has_first_strip) {
      const CompilerFence fence;
      NoWork none;
      amx::run_job<kInputParts>(strip_job(p, turn, 0, strip(p, p.first_strip)), none);
    }
    const bool starts_behind = behind != nullptr && amx::has_origins(behind->state);
    const std::int64_t behind_strip = has_scores ? 0 : p.first_strip + num_strips(turn);
    if (!run_strips(p, has_scores, starts_behind ? behind : nullptr, behind_strip, next)) {
      take_scores(p, next);
      p.has_prior = false;
      run_strips(p, true, nullptr, 0, next);
    }
    p.has_first_strip = starts_behind;
    p.first_strip = behind_strip % 2;
    p.prior = turn;
    p.has_prior = true;
    ++p.num_turns;
  }

  /// Returns false where the origins do not suit; then the state is as it was.
  static FOVEA_AMX bool run_strips(const PanelPipeline& p, bool has_scores, const PanelTurn* behind,
                                   std::int64_t behind_strip, NextTile& next) {
    const PanelTurn& turn = p.current;
    const std::int64_t strips = num_strips(turn);
    const std::int64_t blocks = num_blocks(p);
    auto* to = reinterpret_cast<std::uint32_t*>(pairs_of(p, p.num_turns));
    Softmax softmax(turn.state, p.scale_log2, Layouts::pair_part(p.tile_kv) / 4);
    std::int64_t block = 0;
    for (std::int64_t i = 0; i < strips; ++i) {
      TileJob jobs[kMaxJobs];
      std::size_t num_jobs = 0;
      std::int64_t gaps = 0;
      const auto add = [&](const TileJob& job) {
        jobs[num_jobs++] = job;
        gaps += job.num_gaps();
      };
      // Scores first: vector loads wait for tile stores that are still under way.
      if (!has_scores && i + 1 < strips)
        add(strip_job(p, turn, i + 1, strip(p, p.first_strip + i + 1)));
      if (behind != nullptr && i + 1 == strips)
        add(strip_job(p, *behind, 0, strip(p, behind_strip)));
      for (; block * strips < blocks * (i + 1); ++block) add(block_job(p, block));

      float* const from =
          has_scores ? all_scores(p) + i * kStripFloats : strip(p, p.first_strip + i);
      if (!has_scores) prepare(turn, i, from);
      const CompilerFence fence;
      softmax.start_strip(from, to + i * kStripPairs * kLanes, gaps);
      for (std::size_t job = 0; job < num_jobs; ++job) {
        amx::run_job<kInputParts>(jobs[job], softmax);
        next.fetch();
      }
      softmax.finish_strip();
    }
    if (!has_scores && !softmax.keeps_origins()) return false;
    softmax.store(turn.state);
    return true;
  }

  static constexpr std::size_t kMaxJobs = 2 + kMaxHeadDim / kJobRows;
};

template <int kInputParts>
PanelKernels make_kernels() {
  using Layouts = Layout<kInputParts>;
  PanelKernels kernels = *panel_kernels(CpuTarget::avx512);
  kernels.key_block = kStripKeys;
  kernels.value_block = kJobRows;
  kernels.product = kInputParts == 1 ? Dtype::bf16 : Dtype::f32;
  kernels.start = amx::start;
  kernels.stop = amx::stop;
  kernels.query_bytes = Layouts::query_bytes;
  kernels.key_bytes = Layouts::key_bytes;
  kernels.value_bytes = Layouts::value_bytes;
  kernels.score_bytes = Layouts::score_bytes;
  kernels.output_bytes = output_bytes;
  kernels.pack_queries = pack_queries<kInputParts>;
  kernels.load_keys = load_keys<kInputParts>;
  kernels.load_values = load_values<kInputParts>;
  kernels.scores = scores<kInputParts>;
  kernels.softmax = softmax<kInputParts>;
  if (kInputParts == 1) kernels.pack_probabilities = pack_probabilities;
  kernels.accumulate = accumulate<kInputParts>;
  kernels.pipeline_bytes = Pipeline<kInputParts>::bytes;
  kernels.push = Pipeline<kInputParts>::push;
  kernels.flush = Pipeline<kInputParts>::flush;
  return kernels;
}

}  // namespace

const PanelKernels* panel_kernels_amx_bf16() {
  static const PanelKernels kernels = make_kernels<1>();
  return &kernels;
}

const PanelKernels* panel_kernels_amx_split() {
  static const PanelKernels kernels = make_kernels<2>();
  return &kernels;
}

}  // namespace fovea::cpu

#else

namespace fovea::cpu {

const PanelKernels* panel_kernels_amx_split() { return nullptr; }

}  // namespace fovea::cpu

#endif
