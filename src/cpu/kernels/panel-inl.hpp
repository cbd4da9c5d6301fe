// The panel steps in f32, written once against Highway and compiled per target. Layouts and contracts: panel.hpp.
//
// Bound: the f32 multiply-add rate. A block of kKeyRows x kVectors accumulators (24 registers of 32, or 12 of 16) does
// kKeyRows * kVectors multiply-adds for kVectors loads and kKeyRows broadcasts, so loads stay below half of the load
// ports. Note: the products accumulate in one chain per element along head_dim and along the keys of a tile. That order
// is part of the contract that a row's bits depend on nothing but its own sequence.

#if defined(FOVEA_CPU_KERNELS_PANEL_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_PANEL_INL_HPP_
#undef FOVEA_CPU_KERNELS_PANEL_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_PANEL_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/kernels/panel.hpp"
#include "hwy/highway.h"
// after highway.h: per-target headers
#include "cpu/kernels/dropout-inl.hpp"
#include "cpu/kernels/few_rows-inl.hpp"
#include "cpu/kernels/math-inl.hpp"
#include "cpu/kernels/panel_rows-inl.hpp"
#include "cpu/kernels/program-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
inline std::size_t float_bytes(std::int64_t count) {
  return static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(float)), 64));
}

/// Floats from one group of kBlockRows value columns to the next. A cache line more than the group
/// takes: groups 4096 bytes apart would all fall into one set of the first-level cache.
inline constexpr std::int64_t group_pitch(std::int64_t num_keys) {
  return round_up(num_keys * kBlockRows, 16) + 16;
}

inline std::size_t panel_query_bytes(std::int64_t head_dim) {
  return float_bytes(head_dim * kPanelLanes);
}
inline std::size_t panel_key_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return float_bytes(tile_kv * head_dim);
}
inline std::size_t panel_value_bytes(std::int64_t tile_kv, std::int64_t head_dim) {
  return float_bytes(group_pitch(tile_kv) * (round_up(head_dim, kBlockRows) / kBlockRows)) +
         float_bytes(round_up(head_dim, kBlockRows));
}
inline std::size_t panel_score_bytes(std::int64_t tile_kv) {
  return float_bytes(tile_kv * kPanelLanes);
}
inline std::size_t panel_output_bytes(std::int64_t head_dim) {
  return float_bytes(round_up(head_dim, kBlockRows) * kPanelLanes);
}

HWY_ATTR inline void pack_queries(const std::byte* const* rows, Dtype dtype,
                                  std::int64_t col_stride, std::int64_t head_dim, void* queries) {
  auto* out = static_cast<float*>(queries);
  constexpr std::int64_t kChunk = 64;
  HWY_ALIGN float buffer[kPackedLanes][kChunk];
  const auto element = static_cast<std::int64_t>(size_bytes(dtype));
  const bool is_ready = dtype == Dtype::f32 && col_stride == 1;
  for (int lane = 0; lane < kPanelLanes; lane += kPackedLanes) {
    for (std::int64_t begin = 0; begin < head_dim; begin += kChunk) {
      const std::int64_t count = HWY_MIN(kChunk, head_dim - begin);
      const float* from[kPackedLanes];
      for (int k = 0; k < kPackedLanes; ++k) {
        const std::byte* row = rows[lane + k];
        from[k] = buffer[k];
        if (row == nullptr) {
          std::memset(buffer[k], 0, sizeof(buffer[k]));
        } else if (is_ready) {
          from[k] = reinterpret_cast<const float*>(row) + begin;
        } else {
          convert_row(row + begin * col_stride * element, dtype, col_stride, count, buffer[k]);
        }
      }
      pack_lanes(from, count, out + begin * kPanelLanes + lane);
    }
  }
}

HWY_ATTR inline KeyTile load_keys(const TileSource& source, void* buffer) {
  if (source.dtype == Dtype::f32 && source.col_stride == 1) {
    return {source.data, source.row_stride, source.num_rows};
  }
  auto* out = static_cast<float*>(buffer);
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t key = 0; key < source.num_rows; ++key) {
    convert_row(source.data + key * row_bytes, source.dtype, source.col_stride, source.num_cols,
                out + key * source.num_cols);
  }
  return {out, source.num_cols, source.num_rows};
}

/// Values as [ceil(head_dim / kBlockRows)][keys][kBlockRows], groups group_pitch apart: the
/// broadcasts of a block read one stream.
HWY_ATTR inline void load_values(const TileSource& source, bool is_careful, void* buffer) {
  auto* out = static_cast<float*>(buffer);
  const std::int64_t groups = round_up(source.num_cols, kBlockRows) / kBlockRows;
  const std::int64_t pitch = group_pitch(source.num_rows);
  float* converted = out + groups * pitch;
  for (std::int64_t i = source.num_cols; i < groups * kBlockRows; ++i) converted[i] = 0;
  const bool is_ready = source.dtype == Dtype::f32 && source.col_stride == 1 && !is_careful &&
                        source.num_cols % kBlockRows == 0;
  const std::int64_t row_bytes =
      source.row_stride * static_cast<std::int64_t>(size_bytes(source.dtype));
  for (std::int64_t key = 0; key < source.num_rows; ++key) {
    const std::byte* from = source.data + key * row_bytes;
    if (!is_ready) convert_row(from, source.dtype, source.col_stride, source.num_cols, converted);
    if (is_careful) zero_non_finite(converted, source.num_cols);
    const float* row = is_ready ? reinterpret_cast<const float*>(from) : converted;
    for (std::int64_t group = 0; group < groups; ++group) {
      std::memcpy(out + group * pitch + key * kBlockRows, row + group * kBlockRows,
                  kBlockRows * sizeof(float));
    }
  }
}

/// kRows keys against kVectors vectors of queries.
template <int kRows, int kVectors>
HWY_ATTR HWY_INLINE void scores_block(const float* HWY_RESTRICT queries,
                                      const float* HWY_RESTRICT keys, std::int64_t key_stride,
                                      std::int64_t head_dim, float* HWY_RESTRICT out) {
  const FloatTag d;
  FloatVector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  for (std::int64_t i = 0; i < head_dim; ++i) {
    FloatVector q[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      q[v] = hn::Load(d, queries + i * kPanelLanes + v * kVectorLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FloatVector k = hn::Set(d, keys[r * key_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(k, q[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      hn::Store(sum[r][v], d, out + r * kPanelLanes + v * kVectorLanes);
  }
}

/// The last keys, fewer than a block.
template <int kRows, int kVectors>
HWY_ATTR inline void scores_tail(const float* queries, const float* keys, std::int64_t key_stride,
                                 std::int64_t num_keys, std::int64_t head_dim, float* out) {
  if constexpr (kRows > 0) {
    if (num_keys == kRows) {
      scores_block<kRows, kVectors>(queries, keys, key_stride, head_dim, out);
    } else {
      scores_tail<kRows - 1, kVectors>(queries, keys, key_stride, num_keys, head_dim, out);
    }
  }
}

template <int kVectors>
HWY_ATTR inline void scores_of(const float* queries, const KeyTile& keys, KeyRange range,
                               std::int64_t head_dim, float* scores, NextTile& next) {
  const float* data = static_cast<const float*>(keys.data) + range.begin * keys.row_stride;
  std::int64_t key = 0;
  for (; key + kBlockRows <= range.count; key += kBlockRows) {
    scores_block<kBlockRows, kVectors>(queries, data + key * keys.row_stride, keys.row_stride,
                                       head_dim, scores + key * kPanelLanes);
    next.fetch();
  }
  scores_tail<kBlockRows - 1, kVectors>(queries, data + key * keys.row_stride, keys.row_stride,
                                        range.count - key, head_dim, scores + key * kPanelLanes);
}

/// Calls step<number of vectors in use>: padding vectors of a short panel cost nothing.
#define FOVEA_FOR_VECTORS(num_vectors, step, ...) \
  switch (num_vectors) {                          \
    case 1:                                       \
      step<1>(__VA_ARGS__);                       \
      break;                                      \
    case 2:                                       \
      step<2>(__VA_ARGS__);                       \
      break;                                      \
    default:                                      \
      step<kPanelVectors>(__VA_ARGS__);           \
  }

HWY_ATTR inline void scores(const void* queries, const KeyTile& keys, KeyRange range,
                            std::int64_t head_dim, int num_vectors, float* out, NextTile& next) {
  FOVEA_FOR_VECTORS(num_vectors, scores_of, static_cast<const float*>(queries), keys, range,
                    head_dim, out, next);
}

HWY_ATTR inline void scale(float* scores, std::int64_t num_keys, float factor) {
  const FloatTag d;
  const FloatVector f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < num_keys * kPanelLanes; i += kVectorLanes) {
    hn::Store(hn::Mul(hn::Load(d, scores + i), f), d, scores + i);
  }
}

HWY_ATTR inline void hide(float* HWY_RESTRICT scores, std::int64_t num_keys, std::int64_t kv_begin,
                          const SeenKeys& seen) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const FloatVector hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int lane = 0; lane < kPanelLanes; lane += kVectorLanes) {
    const auto begin = hn::Load(di, seen.begin + lane);
    const auto end = hn::Load(di, seen.end + lane);
    auto key = hn::Set(di, static_cast<std::int32_t>(kv_begin));
    for (float* at = scores + lane; at < scores + num_keys * kPanelLanes; at += kPanelLanes) {
      const auto is_seen = hn::AndNot(hn::Lt(key, begin), hn::Lt(key, end));
      hn::Store(hn::IfThenElse(hn::RebindMask(d, is_seen), hn::Load(d, at), hidden), d, at);
      key = hn::Add(key, hn::Set(di, 1));
    }
  }
}

/// Row maximum, the factor for what was summed before, and the probabilities of one tile.
///
/// Probabilities are relative to the row's origin, which follows the maximum only when that has grown by more than
/// kMaxGrowth: sums up to 2^8 times larger cost no precision, and nearly all rescaling of Oᵀ falls away.
/// The maximum is taken as max(score, so_far): where the score is NaN that leaves the maximum alone and the NaN reaches
/// the row through its probability. A row without a visible key keeps -inf and counts from 0, so that all its terms are
/// 2^-inf = 0. The maximum is subtracted before the scale: of 1e30 (or of the lowest float, a common bias) the
/// product's rounding error is more than an exponent holds.
template <int kVectors>
HWY_ATTR inline void softmax_of(float* HWY_RESTRICT scores, std::int64_t num_keys, float scale_log2,
                                const PanelState& state) {
  const FloatTag d;
  const FloatVector factor = hn::Set(d, scale_log2);
  const FloatVector lowest = hn::Set(d, kZeroPower / scale_log2);
  const FloatVector nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
  float* const origins = state.origin != nullptr ? state.origin : state.row_max;
  const FloatVector most = hn::Set(d, state.origin != nullptr ? kMaxGrowth : 0.0F);
  FloatVector row_max[kVectors], origin[kVectors], sum[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) row_max[v] = hn::Load(d, state.row_max + v * kVectorLanes);
  for (std::int64_t key = 0; key < num_keys; ++key) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const FloatVector s = hn::Load(d, scores + key * kPanelLanes + v * kVectorLanes);
      row_max[v] = hn::Max(s, row_max[v]);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const FloatVector before = hn::Load(d, origins + v * kVectorLanes);
    // False for the first key: the difference is infinite, or NaN where there is none yet.
    const auto keeps = hn::Le(hn::Mul(hn::Sub(row_max[v], before), factor), most);
    const FloatVector after = hn::IfThenElse(keeps, before, row_max[v]);
    hn::Store(row_max[v], d, state.row_max + v * kVectorLanes);
    hn::Store(after, d, origins + v * kVectorLanes);
    origin[v] = hn::IfThenZeroElse(hn::Eq(after, nothing), after);
    const FloatVector rescale = exp2_nonpositive(d, hn::Sub(before, origin[v]), factor, lowest);
    // An unchanged origin rescales by exactly 1, -inf too.
    const FloatVector exact = hn::IfThenElse(hn::Eq(before, after), hn::Set(d, 1.0F), rescale);
    hn::Store(exact, d, state.rescale + v * kVectorLanes);
    sum[v] = hn::Mul(hn::Load(d, state.row_sum + v * kVectorLanes), exact);
  }
  for (std::int64_t key = 0; key < num_keys; ++key) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + key * kPanelLanes + v * kVectorLanes;
      const FloatVector x = hn::Sub(hn::Load(d, at), origin[v]);
      const FloatVector p = exp2_nonpositive(d, x, factor, lowest);
      hn::Store(p, d, at);
      sum[v] = hn::Add(sum[v], p);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) hn::Store(sum[v], d, state.row_sum + v * kVectorLanes);
}

/// Drops probabilities after they were summed: the denominator is that of the whole row.
HWY_ATTR inline void drop(float* probabilities, std::int64_t num_keys, int num_vectors,
                          const PanelDropout& dropout) {
  const FloatTag d;
  const FloatVector keep_scale = hn::Set(d, dropout.keep_scale);
  for (int vector = 0; vector < num_vectors; ++vector) {
    DropoutColumn column(dropout, vector);
    for (std::int64_t key = 0; key < num_keys; ++key) {
      float* at = probabilities + key * kPanelLanes + vector * kVectorLanes;
      const FloatVector scaled = hn::Mul(hn::Load(d, at), keep_scale);
      hn::Store(hn::IfThenElseZero(column.keeps(key), scaled), d, at);
    }
  }
}

HWY_ATTR inline void softmax(float* scores, std::int64_t num_keys, int num_vectors,
                             float scale_log2, const PanelState& state,
                             const PanelDropout& dropout) {
  FOVEA_FOR_VECTORS(num_vectors, softmax_of, scores, num_keys, scale_log2, state);
  if (dropout.threshold > 0) drop(scores, num_keys, num_vectors, dropout);
}

template <int kVectors>
HWY_ATTR inline void accumulate_of(const float* HWY_RESTRICT values, std::int64_t tile_keys,
                                   KeyRange range, const float* HWY_RESTRICT probabilities,
                                   std::int64_t head_dim, const float* HWY_RESTRICT rescale,
                                   float* HWY_RESTRICT out, NextTile& next) {
  const FloatTag d;
  values += range.begin * kBlockRows;
  for (std::int64_t begin = 0; begin < head_dim; begin += kBlockRows) {
    float* HWY_RESTRICT rows = out + begin * kPanelLanes;
    FloatVector sum[kBlockRows][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const FloatVector factor = hn::Load(d, rescale + v * kVectorLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        sum[r][v] = hn::Mul(hn::Load(d, rows + r * kPanelLanes + v * kVectorLanes), factor);
      }
    }
    for (std::int64_t key = 0; key < range.count; ++key) {
      FloatVector p[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        p[v] = hn::Load(d, probabilities + key * kPanelLanes + v * kVectorLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        const FloatVector value = hn::Set(d, values[key * kBlockRows + r]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(value, p[v], sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        hn::Store(sum[r][v], d, rows + r * kPanelLanes + v * kVectorLanes);
    }
    values += group_pitch(tile_keys);
    next.fetch();
  }
}

HWY_ATTR inline void accumulate(const void* values, std::int64_t tile_keys, KeyRange range,
                                const void* probabilities, std::int64_t head_dim, int num_vectors,
                                const float* rescale, float* out, NextTile& next) {
  FOVEA_FOR_VECTORS(num_vectors, accumulate_of, static_cast<const float*>(values), tile_keys, range,
                    static_cast<const float*>(probabilities), head_dim, rescale, out, next);
}

template <int kVectors>
HWY_ATTR inline void find_non_finite(const float* HWY_RESTRICT out, std::int64_t head_dim,
                                     bool* is_finite) {
  const FloatTag d;
  // x * 0 is 0 for numbers and NaN for the rest: one multiply-add per vector.
  FloatVector zero[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) zero[v] = hn::Zero(d);
  for (std::int64_t i = 0; i < head_dim; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const FloatVector x = hn::Load(d, out + i * kPanelLanes + v * kVectorLanes);
      zero[v] = hn::MulAdd(x, hn::Zero(d), zero[v]);
    }
  }
  *is_finite = true;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) *is_finite &= hn::AllTrue(d, hn::Eq(zero[v], hn::Zero(d)));
}

HWY_ATTR inline bool is_finite(const float* out, std::int64_t head_dim, int num_vectors) {
  bool result = true;
  FOVEA_FOR_VECTORS(num_vectors, find_non_finite, out, head_dim, &result);
  return result;
}

#undef FOVEA_FOR_VECTORS

HWY_ATTR inline void extract_rows(const float* HWY_RESTRICT out, LaneRange lanes,
                                  std::int64_t head_dim, float* HWY_RESTRICT rows,
                                  std::int64_t pitch) {
  std::int64_t lane = 0;
#if HWY_TARGET != HWY_SCALAR
  const QuadTag d;
  for (; lane + 4 <= lanes.count; lane += 4) {
    const float* from = out + lanes.begin + lane;
    float* to = rows + lane * pitch;
    std::int64_t i = 0;
    for (; i + 4 <= head_dim; i += 4) {
      hn::Vec<QuadTag> quads[4];
      for (int k = 0; k < 4; ++k) quads[k] = hn::LoadU(d, from + (i + k) * kPanelLanes);
      transpose(quads);
      for (int k = 0; k < 4; ++k) hn::StoreU(quads[k], d, to + k * pitch + i);
    }
    for (; i < head_dim; ++i) {
      for (int k = 0; k < 4; ++k) to[k * pitch + i] = from[i * kPanelLanes + k];
    }
  }
#endif
  for (; lane < lanes.count; ++lane) {
    for (std::int64_t i = 0; i < head_dim; ++i)
      rows[lane * pitch + i] = out[i * kPanelLanes + lanes.begin + lane];
  }
}

inline const PanelKernels& f32_panel_kernels() {
  static constexpr PanelKernels kKernels{
      .lanes = kPanelLanes,
      .key_block = kBlockRows,
      .value_block = kBlockRows,
      .vector_lanes = kVectorLanes,
      .product = Dtype::f32,
      .query_bytes = panel_query_bytes,
      .key_bytes = panel_key_bytes,
      .value_bytes = panel_value_bytes,
      .score_bytes = panel_score_bytes,
      .output_bytes = panel_output_bytes,
      .pack_queries = pack_queries,
      .load_keys = load_keys,
      .load_values = load_values,
      .scores = scores,
      .scale = scale,
      .run_score = run_score_program,
      .run_mask = run_mask_program,
      .hide = hide,
      .softmax = softmax,
      .accumulate = accumulate,
      .is_finite = is_finite,
      .extract_rows = extract_rows,
      .store_row = store_row,
      .numbers = numbers,
      .scores_few = scores_few,
      .softmax_few = softmax_few,
      .accumulate_few = accumulate_few,
  };
  return kKernels;
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
