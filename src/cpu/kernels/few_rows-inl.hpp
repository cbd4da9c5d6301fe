// Scores, softmax and values for sequences of a few rows (decode): the work is to read K and V once, at the speed of
// memory.
//
// A panel would leave most of its lanes empty and copy V first. Here every key is read row by row in the order of
// memory and dotted with the few queries; values are added with their probability. Rows of scores lie along the keys,
// so the softmax of one row fills its vectors.
//
// Bound: per key of bf16 at head_dim 128, 48 operations on two ports to convert K and V, 16 multiply-adds a row and 3
// operations a row for the sum: 34 cycles for one row, where 512 bytes take 100 to arrive. Rows are taken kRowsAtOnce
// at a time, so that eight cost 130.

#if defined(FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#undef FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/scalar_io.hpp"
#include "cpu/kernels/panel.hpp"
#include "hwy/highway.h"
#include "problem/head_dim.hpp"
// after highway.h: per-target headers
#include "cpu/kernels/math-inl.hpp"
#include "cpu/kernels/panel_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::int64_t kKeysAtOnce = kFewKeys;
inline constexpr int kRowsAtOnce = 4;
inline constexpr std::int64_t kRowsAhead = 8;  // of prefetch: 4 KB at head_dim 128 in fp32

/// A vector of consecutive elements as fp32.
template <Dtype kDtype>
HWY_ATTR HWY_INLINE FloatVector load_floats(const std::byte* row, std::int64_t i) {
  const FloatTag d;
  const hn::Rebind<std::uint16_t, FloatTag> d16;
  if constexpr (kDtype == Dtype::f32) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + i);
  } else if constexpr (kDtype == Dtype::bf16) {
    const hn::Rebind<std::uint32_t, FloatTag> d32;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + i);
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
  } else {
    const hn::Rebind<hwy::float16_t, FloatTag> d_half;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(row) + i);
    return hn::PromoteTo(d, hn::BitCast(d_half, bits));
  }
}

/// kKeysAtOnce rows of K or V, elements of kDtype side by side: where they lie, or converted to fp32 (kDtype f32).
struct NearRows {
  const std::byte* at[kKeysAtOnce];
  HWY_ALIGN float buffer[kKeysAtOnce][kMaxHeadDim];

  /// Rows [row, row + count); what is missing to kKeysAtOnce repeats the first.
  HWY_ATTR void load(const TileSource& source, std::int64_t row, std::int64_t count, bool is_ready,
                     bool is_careful) {
    const std::int64_t row_bytes = source.row_bytes();
    const auto row_at = [&](std::int64_t index) {
      return source.rows != nullptr ? source.rows[index] : source.data + index * row_bytes;
    };
    for (std::int64_t i = 0; i < kKeysAtOnce; ++i) {
      if (i >= count) {
        at[i] = at[0];
        continue;
      }
      const std::byte* from = row_at(row + i);
      if (row + i + kRowsAhead < source.num_rows) prefetch(row_at(row + i + kRowsAhead), source);
      at[i] = is_ready ? from : reinterpret_cast<const std::byte*>(buffer[i]);
      if (is_ready) continue;
      convert_row_of(source, from, row + i, buffer[i]);
      if (is_careful) zero_non_finite(buffer[i], source.num_cols);
    }
  }

  static void prefetch(const std::byte* row, const TileSource& source) {
    const std::int64_t bytes =
        source.num_cols * static_cast<std::int64_t>(size_bytes(source.dtype));
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 3);
  }
};

#if HWY_TARGET == HWY_SCALAR
HWY_ATTR HWY_INLINE void store_sums(const FloatVector (&v)[kKeysAtOnce], float* to) {
  for (int k = 0; k < kKeysAtOnce; ++k) to[k] = hn::GetLane(v[k]);
}
#else
/// The halves of a vector added up until four lanes are left.
template <class D>
HWY_ATTR HWY_INLINE hn::Vec<QuadTag> folded(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return folded(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

/// The sums of the lanes of four vectors, side by side.
HWY_ATTR HWY_INLINE void store_sums(const FloatVector (&v)[kKeysAtOnce], float* to) {
  const FloatTag d;
  const hn::RepartitionToWide<FloatTag> wide;
  const auto pairs = [&](FloatVector a, FloatVector b) HWY_ATTR {
    return hn::BitCast(wide, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  };
  const auto first = pairs(v[0], v[1]);
  const auto second = pairs(v[2], v[3]);
  const auto even = hn::BitCast(d, hn::InterleaveLower(wide, first, second));
  const auto odd = hn::BitCast(d, hn::InterleaveUpper(wide, first, second));
  hn::StoreU(folded(d, hn::Add(even, odd)), QuadTag(), to);
}
#endif

/// Dot products of kKeysAtOnce keys with kRows queries; `to` has room for kKeysAtOnce in each row.
template <int kRows, Dtype kDtype>
HWY_ATTR HWY_INLINE void dot_keys(const NearRows& keys, RowBlock queries, std::int64_t head_dim,
                                  RowBlock to) {
  const FloatTag d;
  FloatVector sum[kRows][kKeysAtOnce];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeysAtOnce; ++k) sum[r][k] = hn::Zero(d);
  }
  std::int64_t i = 0;
  for (; i + kVectorLanes <= head_dim; i += kVectorLanes) {
    FloatVector key[kKeysAtOnce];
#pragma GCC unroll 4
    for (int k = 0; k < kKeysAtOnce; ++k) key[k] = load_floats<kDtype>(keys.at[k], i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const FloatVector query = hn::LoadU(d, queries.row(r) + i);
#pragma GCC unroll 4
      for (int k = 0; k < kKeysAtOnce; ++k) sum[r][k] = hn::MulAdd(key[k], query, sum[r][k]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    store_sums(sum[r], to.row(r));
    for (std::int64_t j = i; j < head_dim; ++j) {
      for (int k = 0; k < kKeysAtOnce; ++k)
        to.row(r)[k] += load_scalar(keys.at[k], kDtype, j) * queries.row(r)[j];
    }
  }
}

/// Calls step<rows, dtype of the elements that it will see>.
#define FOVEA_FOR_ROWS(num_rows, dtype, step, ...) \
  switch (num_rows) {                              \
    case 1:                                        \
      step<1, dtype>(__VA_ARGS__);                 \
      break;                                       \
    case 2:                                        \
      step<2, dtype>(__VA_ARGS__);                 \
      break;                                       \
    case 3:                                        \
      step<3, dtype>(__VA_ARGS__);                 \
      break;                                       \
    default:                                       \
      step<kRowsAtOnce, dtype>(__VA_ARGS__);       \
  }

/// Elements of K are kDtype once NearRows has them.
template <Dtype kDtype>
HWY_ATTR inline void scores_of_few_rows(RowBlock queries, int num_rows, const TileSource& keys,
                                        bool is_ready, RowBlock scores, NextTile& next) {
  NearRows near;
  HWY_ALIGN float last[kRowsAtOnce][kKeysAtOnce];
  for (std::int64_t key = 0; key < keys.num_rows; key += kKeysAtOnce) {
    const std::int64_t count = std::min(kKeysAtOnce, keys.num_rows - key);
    next.fetch();
    near.load(keys, key, count, is_ready, /*is_careful=*/false);
    for (int r = 0; r < num_rows; r += kRowsAtOnce) {
      const int group = std::min(kRowsAtOnce, num_rows - r);
      const RowBlock to =
          count == kKeysAtOnce ? scores.part(r, key) : RowBlock{last[0], kKeysAtOnce};
      FOVEA_FOR_ROWS(group, kDtype, dot_keys, near, queries.part(r, 0), keys.num_cols, to);
      if (count == kKeysAtOnce) continue;
      for (int i = 0; i < group; ++i) std::copy_n(last[i], count, scores.row(r + i) + key);
    }
  }
}

/// sums += weights[0] * row 0 + weights[1] * row 1 + ..., in this order, for kRows rows of sums.
template <int kRows, Dtype kDtype, int kKeys>
HWY_ATTR HWY_INLINE void add_keys(const NearRows& rows, std::int64_t first, RowBlock weights,
                                  std::int64_t head_dim, RowBlock sums) {
  const FloatTag d;
  FloatVector weight[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) weight[r][k] = hn::Set(d, weights.row(r)[k]);
  }
  std::int64_t i = 0;
  for (; i + kVectorLanes <= head_dim; i += kVectorLanes) {
    FloatVector value[kKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) value[k] = load_floats<kDtype>(rows.at[first + k], i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      FloatVector sum = hn::LoadU(d, sums.row(r) + i);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) sum = hn::MulAdd(weight[r][k], value[k], sum);
      hn::StoreU(sum, d, sums.row(r) + i);
    }
  }
  for (; i < head_dim; ++i) {
    for (int r = 0; r < kRows; ++r) {
      for (int k = 0; k < kKeys; ++k)
        sums.row(r)[i] += weights.row(r)[k] * load_scalar(rows.at[first + k], kDtype, i);
    }
  }
}

template <int kRows, Dtype kDtype>
HWY_ATTR HWY_INLINE void add_near_keys(const NearRows& rows, std::int64_t count, RowBlock weights,
                                       std::int64_t head_dim, RowBlock sums) {
  if (count == kKeysAtOnce) {
    add_keys<kRows, kDtype, kKeysAtOnce>(rows, 0, weights, head_dim, sums);
  } else {
    for (std::int64_t k = 0; k < count; ++k)
      add_keys<kRows, kDtype, 1>(rows, k, weights.part(0, k), head_dim, sums);
  }
}

template <Dtype kDtype>
HWY_ATTR inline void accumulate_few_rows(const TileSource& values, bool is_ready, bool is_careful,
                                         RowBlock probabilities, int num_rows, RowBlock sums,
                                         NextTile& next) {
  NearRows near;
  for (std::int64_t key = 0; key < values.num_rows; key += kKeysAtOnce) {
    const std::int64_t count = std::min(kKeysAtOnce, values.num_rows - key);
    next.fetch();
    near.load(values, key, count, is_ready, is_careful);
    for (int r = 0; r < num_rows; r += kRowsAtOnce) {
      const int group = std::min(kRowsAtOnce, num_rows - r);
      FOVEA_FOR_ROWS(group, kDtype, add_near_keys, near, count, probabilities.part(r, key),
                     values.num_cols, sums.part(r, 0));
    }
  }
}

#undef FOVEA_FOR_ROWS

/// Can rows be read where they lie? Codes cannot: they have scales. Note: Highway's scalar conversion of f16 takes Inf
/// and NaN for numbers.
inline bool is_read_in_place(const TileSource& source, bool is_careful) {
  const bool has_conversion = HWY_TARGET != HWY_SCALAR || source.dtype == Dtype::f32;
  return source.col_stride == 1 && !is_careful && has_conversion && source.scales == nullptr;
}

HWY_ATTR inline void scores_few(RowBlock queries, int num_rows, const TileSource& keys,
                                RowBlock scores, NextTile& next) {
  const bool is_ready = is_read_in_place(keys, /*is_careful=*/false);
  const Dtype dtype = is_ready ? keys.dtype : Dtype::f32;
  if (dtype == Dtype::bf16)
    return scores_of_few_rows<Dtype::bf16>(queries, num_rows, keys, is_ready, scores, next);
  if (dtype == Dtype::f16)
    return scores_of_few_rows<Dtype::f16>(queries, num_rows, keys, is_ready, scores, next);
  scores_of_few_rows<Dtype::f32>(queries, num_rows, keys, is_ready, scores, next);
}

HWY_ATTR inline void accumulate_few(const TileSource& values, bool is_careful,
                                    RowBlock probabilities, int num_rows, RowBlock sums,
                                    NextTile& next) {
  const bool is_ready = is_read_in_place(values, is_careful);
  const Dtype dtype = is_ready ? values.dtype : Dtype::f32;
  if (dtype == Dtype::bf16) {
    return accumulate_few_rows<Dtype::bf16>(values, is_ready, is_careful, probabilities, num_rows,
                                            sums, next);
  }
  if (dtype == Dtype::f16) {
    return accumulate_few_rows<Dtype::f16>(values, is_ready, is_careful, probabilities, num_rows,
                                           sums, next);
  }
  accumulate_few_rows<Dtype::f32>(values, is_ready, is_careful, probabilities, num_rows, sums,
                                  next);
}

/// softmax_of (panel-inl.hpp) for one row, whose maximum and sum are over the lanes of vectors.
HWY_ATTR inline void softmax_row(float* HWY_RESTRICT scores, std::int64_t num_keys,
                                 float scale_log2, const PanelState& state) {
  const FloatTag d;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const std::int64_t padded = (num_keys + kVectorLanes - 1) / kVectorLanes * kVectorLanes;
  std::fill(scores + num_keys, scores + padded, kNothing);
  FloatVector highest = hn::Set(d, *state.row_max);
  for (std::int64_t key = 0; key < padded; key += kVectorLanes)
    highest = hn::Max(hn::LoadU(d, scores + key), highest);  // where a score is NaN, so far
  const float row_max = hn::GetLane(hn::MaxOfLanes(d, highest));
  const float before = *state.origin;
  const bool keeps_origin = (row_max - before) * scale_log2 <= kMaxGrowth;
  const float after = keeps_origin ? before : row_max;
  const float origin = after == kNothing ? 0 : after;
  const FloatVector factor = hn::Set(d, scale_log2);
  const FloatVector lowest = hn::Set(d, kZeroPower / scale_log2);
  const FloatVector rescale = exp2_nonpositive(d, hn::Set(d, before - origin), factor, lowest);
  *state.rescale = before == after ? 1.0F : hn::GetLane(rescale);
  FloatVector sum = hn::Zero(d);
  for (std::int64_t key = 0; key < padded; key += kVectorLanes) {
    const FloatVector x = hn::Sub(hn::LoadU(d, scores + key), hn::Set(d, origin));
    const FloatVector p = exp2_nonpositive(d, x, factor, lowest);
    hn::StoreU(p, d, scores + key);
    sum = hn::Add(sum, p);
  }
  *state.row_max = row_max;
  *state.origin = after;
  *state.row_sum = *state.row_sum * *state.rescale + hn::GetLane(hn::SumOfLanes(d, sum));
}

HWY_ATTR inline void softmax_few(RowBlock scores, int num_rows, std::int64_t num_keys,
                                 float scale_log2, const PanelState& state) {
  for (int r = 0; r < num_rows; ++r) {
    const PanelState row{state.row_max + r, state.row_sum + r, state.rescale + r, state.origin + r};
    softmax_row(scores.row(r), num_keys, scale_log2, row);
  }
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
