// Scores and values for sequences of a few rows (decode): the work is to read K and V once, at the speed of memory.
//
// A panel would leave most of its lanes empty and copy V first. Here every key is read row by row in the order of memory and
// dotted with the few queries; values are added with their probability. Scores keep the panel's layout, so programs, masks
// and softmax are the same. At head_dim 128 a key takes some 15 cycles against 100 and more that its 1 KB takes to arrive.

#if defined(FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#undef FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_FEW_ROWS_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/scalar_io.hpp"
#include "cpu/kernels/panel.hpp"
#include "hwy/highway.h"
// after highway.h: per-target headers
#include "cpu/kernels/panel_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::int64_t kMaxHeadDim = 512;
inline constexpr std::int64_t kKeysAtOnce = kFewKeys;
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
      convert_row(from, source.dtype, source.col_stride, source.num_cols, buffer[i]);
      if (is_careful) zero_non_finite(buffer[i], source.num_cols);
    }
  }

  static void prefetch(const std::byte* row, const TileSource& source) {
    const std::int64_t bytes =
        source.num_cols * static_cast<std::int64_t>(size_bytes(source.dtype));
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 3);
  }
};

/// Dot products of kKeysAtOnce keys with kRows queries.
template <int kRows, Dtype kDtype>
HWY_ATTR HWY_INLINE void dot_keys(const NearRows& keys, const float (*queries)[kMaxHeadDim],
                                  std::int64_t head_dim, float (*dots)[kKeysAtOnce]) {
  const FloatTag d;
  FloatVector sum[kRows][kKeysAtOnce];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kKeysAtOnce; ++k) sum[r][k] = hn::Zero(d);
  }
  std::int64_t i = 0;
  for (; i + kVectorLanes <= head_dim; i += kVectorLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeysAtOnce; ++k) {
      const FloatVector key = load_floats<kDtype>(keys.at[k], i);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        sum[r][k] = hn::MulAdd(key, hn::Load(d, queries[r] + i), sum[r][k]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kKeysAtOnce; ++k) {
      float dot = hn::GetLane(hn::SumOfLanes(d, sum[r][k]));
      for (std::int64_t j = i; j < head_dim; ++j)
        dot += load_scalar(keys.at[k], kDtype, j) * queries[r][j];
      dots[r][k] = dot;
    }
  }
}

/// One call's scores; elements of K are kDtype once NearRows has them.
template <int kRows, Dtype kDtype>
HWY_ATTR inline void scores_of_few_rows(const FewQueries& queries, const TileSource& keys,
                                        bool is_ready, float* scores, NextTile& next) {
  const FloatTag d;
  HWY_ALIGN float rows[kRows][kMaxHeadDim];
  NearRows near;
  for (int r = 0; r < kRows; ++r)
    convert_row(queries.rows[r], queries.dtype, queries.col_stride, keys.num_cols, rows[r]);
  for (std::int64_t key = 0; key < keys.num_rows; key += kKeysAtOnce) {
    const std::int64_t count = std::min(kKeysAtOnce, keys.num_rows - key);
    float dots[kRows][kKeysAtOnce];
    next.fetch();
    near.load(keys, key, count, is_ready, /*is_careful=*/false);
    dot_keys<kRows, kDtype>(near, rows, keys.num_cols, dots);
    for (std::int64_t k = 0; k < count; ++k) {
      float* at = scores + (key + k) * kPanelLanes;
      for (int lane = 0; lane < kRows + kVectorLanes - 1; lane += kVectorLanes)
        hn::Store(hn::Zero(d), d, at + lane);
      for (int r = 0; r < kRows; ++r) at[r] = dots[r][k];
    }
  }
}

/// sums += weights[0] * row 0 + weights[1] * row 1 + ..., in this order.
template <int kKeys, Dtype kDtype>
HWY_ATTR HWY_INLINE void add_rows(const NearRows& rows, std::int64_t first, const float* weights,
                                  std::int64_t head_dim, float* HWY_RESTRICT sums) {
  const FloatTag d;
  FloatVector weight[kKeys];
#pragma GCC unroll 4
  for (int k = 0; k < kKeys; ++k) weight[k] = hn::Set(d, weights[k]);
  std::int64_t i = 0;
  for (; i + kVectorLanes <= head_dim; i += kVectorLanes) {
    FloatVector sum = hn::Load(d, sums + i);
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k)
      sum = hn::MulAdd(weight[k], load_floats<kDtype>(rows.at[first + k], i), sum);
    hn::Store(sum, d, sums + i);
  }
  for (; i < head_dim; ++i) {
    for (int k = 0; k < kKeys; ++k)
      sums[i] += weights[k] * load_scalar(rows.at[first + k], kDtype, i);
  }
}

template <int kRows, Dtype kDtype>
HWY_ATTR inline void accumulate_few_rows(const TileSource& values, bool is_ready, bool is_careful,
                                         const float* probabilities, const float* rescale,
                                         float* out, NextTile& next) {
  HWY_ALIGN float sums[kRows][kMaxHeadDim];
  NearRows near;
  for (int r = 0; r < kRows; ++r) {
    for (std::int64_t i = 0; i < values.num_cols; ++i)
      sums[r][i] = out[i * kPanelLanes + r] * rescale[r];
  }
  for (std::int64_t key = 0; key < values.num_rows; key += kKeysAtOnce) {
    const std::int64_t count = std::min(kKeysAtOnce, values.num_rows - key);
    next.fetch();
    near.load(values, key, count, is_ready, is_careful);
    for (int r = 0; r < kRows; ++r) {
      float weights[kKeysAtOnce];
      for (std::int64_t k = 0; k < count; ++k)
        weights[k] = probabilities[(key + k) * kPanelLanes + r];
      if (count == kKeysAtOnce) {
        add_rows<kKeysAtOnce, kDtype>(near, 0, weights, values.num_cols, sums[r]);
      } else {
        for (std::int64_t k = 0; k < count; ++k)
          add_rows<1, kDtype>(near, k, weights + k, values.num_cols, sums[r]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (std::int64_t i = 0; i < values.num_cols; ++i) out[i * kPanelLanes + r] = sums[r][i];
  }
}

/// Can rows be read where they lie? Note: Highway's scalar conversion of f16 takes Inf and NaN for numbers.
inline bool is_read_in_place(const TileSource& source, bool is_careful) {
  const bool has_conversion = HWY_TARGET != HWY_SCALAR || source.dtype == Dtype::f32;
  return source.col_stride == 1 && !is_careful && has_conversion;
}

/// Calls step<rows, dtype of the elements that it will see>.
#define FOVEA_FOR_ROWS(num_rows, dtype, step, ...) \
  switch (num_rows) {                              \
    case 1:                                        \
      return step<1, dtype>(__VA_ARGS__);          \
    case 2:                                        \
      return step<2, dtype>(__VA_ARGS__);          \
    case 3:                                        \
      return step<3, dtype>(__VA_ARGS__);          \
    default:                                       \
      return step<4, dtype>(__VA_ARGS__);          \
  }

HWY_ATTR inline void scores_few(const FewQueries& queries, const TileSource& keys, float* scores,
                                NextTile& next) {
  const bool is_ready = is_read_in_place(keys, /*is_careful=*/false);
  if (is_ready && keys.dtype == Dtype::bf16) {
    FOVEA_FOR_ROWS(queries.num_rows, Dtype::bf16, scores_of_few_rows, queries, keys, is_ready,
                   scores, next);
  }
  if (is_ready && keys.dtype == Dtype::f16) {
    FOVEA_FOR_ROWS(queries.num_rows, Dtype::f16, scores_of_few_rows, queries, keys, is_ready,
                   scores, next);
  }
  FOVEA_FOR_ROWS(queries.num_rows, Dtype::f32, scores_of_few_rows, queries, keys, is_ready, scores,
                 next);
}

HWY_ATTR inline void accumulate_few(const TileSource& values, bool is_careful,
                                    const float* probabilities, int num_rows, const float* rescale,
                                    float* out, NextTile& next) {
  const bool is_ready = is_read_in_place(values, is_careful);
  if (is_ready && values.dtype == Dtype::bf16) {
    FOVEA_FOR_ROWS(num_rows, Dtype::bf16, accumulate_few_rows, values, is_ready, is_careful,
                   probabilities, rescale, out, next);
  }
  if (is_ready && values.dtype == Dtype::f16) {
    FOVEA_FOR_ROWS(num_rows, Dtype::f16, accumulate_few_rows, values, is_ready, is_careful,
                   probabilities, rescale, out, next);
  }
  FOVEA_FOR_ROWS(num_rows, Dtype::f32, accumulate_few_rows, values, is_ready, is_careful,
                 probabilities, rescale, out, next);
}

#undef FOVEA_FOR_ROWS

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
