// The gradient steps in f32, written once against Highway and compiled per target. Layouts and contracts: gradient.hpp.
//
// Bound: the f32 multiply-add rate, as for the panel steps. accumulate_rows keeps 6 keys x 4 vectors of d (24
// accumulators of 32; 6 x 2 of 16): 4 loads and 6 broadcasts per 24 multiply-adds. Its sums run in one chain over the
// rows of a panel, so the order of additions to dK and dV is that of the rows of the sequence.

#if defined(FOVEA_CPU_KERNELS_GRADIENT_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_KERNELS_GRADIENT_INL_HPP_
#undef FOVEA_CPU_KERNELS_GRADIENT_INL_HPP_
#else
#define FOVEA_CPU_KERNELS_GRADIENT_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

#include "cpu/kernels/gradient.hpp"
#include "hwy/highway.h"
// after highway.h: per-target headers
#include "cpu/kernels/dropout-inl.hpp"
#include "cpu/kernels/math-inl.hpp"
#include "cpu/kernels/panel_rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
inline constexpr int kSumVectors = 4;
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kSumVectors = 3;
#else
inline constexpr int kSumVectors = 2;
#endif

/// Keys in a block of accumulators that is `vectors` wide.
constexpr int sum_keys(int vectors) {
  if (kSumVectors == 4) return vectors == 4 ? 6 : 8;
  return kSumVectors == 2 ? 6 : 4;
}

/// A cache line more than the row takes: rows of 4 KB apart would fall into one set of the first-level cache.
inline std::int64_t row_pitch(std::int64_t head_dim) {
  return (head_dim + 15) / 16 * 16 + (head_dim > 64 ? 16 : 0);
}

inline std::size_t row_bytes(std::int64_t head_dim) {
  const std::int64_t bytes = kPanelLanes * row_pitch(head_dim) * 4;
  return static_cast<std::size_t>((bytes + 63) / 64 * 64);
}

/// Rows as f32, row_pitch apart, padded with zeros.
HWY_ATTR inline bool pack_rows(const std::byte* const* rows, std::int64_t num_rows, Dtype dtype,
                               std::int64_t col_stride, std::int64_t head_dim, void* out) {
  const std::int64_t pitch = row_pitch(head_dim);
  bool is_finite = true;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    float* to = static_cast<float*>(out) + row * pitch;
    convert_row(rows[row], dtype, col_stride, head_dim, to);
    for (std::int64_t i = head_dim; i < pitch; ++i) to[i] = 0;
    is_finite &= zero_non_finite(to, head_dim);
  }
  return is_finite;
}

template <bool kDrops>
HWY_ATTR inline void softmax_gradient_of(const SoftmaxGradient& step, int vector) {
  const FloatTag d;
  const FloatVector nothing = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVector log2e = hn::Set(d, std::numbers::log2e_v<float>);
  const FloatVector lowest = hn::Set(d, kZeroPower / std::numbers::log2e_v<float>);
  const FloatVector scale = hn::Set(d, step.scale);
  const FloatVector factor = hn::Set(d, step.factor);
  const FloatVector keep_scale = hn::Set(d, step.dropout.keep_scale);
  const FloatVector origin = hn::Load(d, step.origin + vector * kVectorLanes);
  const FloatVector log_sum = hn::Load(d, step.log_sum + vector * kVectorLanes);
  const FloatVector delta = hn::Load(d, step.delta + vector * kVectorLanes);
  const auto sees = hn::Not(hn::Eq(log_sum, nothing));
  DropoutColumn dropout(step.dropout, vector);
  for (std::int64_t key = 0; key < step.num_keys; ++key) {
    const std::int64_t at = key * step.lanes + vector * kVectorLanes;
    const FloatVector score = hn::Load(d, step.scores + at);
    const auto is_seen = hn::And(sees, hn::Not(hn::Eq(score, nothing)));
    const FloatVector x = hn::MulSub(hn::Sub(score, origin), scale, log_sum);
    const FloatVector p = hn::IfThenElseZero(is_seen, exp2_nonpositive(d, x, log2e, lowest));
    FloatVector weight = p;
    FloatVector product = hn::Zero(d);
    if (step.products != nullptr) product = hn::Load(d, step.products + at);
    if constexpr (kDrops) {
      const auto is_kept = dropout.keeps(key);
      weight = hn::IfThenElseZero(is_kept, hn::Mul(p, keep_scale));
      product = hn::IfThenElseZero(is_kept, hn::Mul(product, keep_scale));
    }
    hn::Store(weight, d, step.scores + at);
    if (step.products == nullptr) continue;
    const FloatVector gradient = hn::Mul(hn::Mul(p, factor), hn::Sub(product, delta));
    hn::Store(hn::IfThenElseZero(is_seen, gradient), d, step.products + at);
  }
}

HWY_ATTR inline void softmax_gradient(const SoftmaxGradient& step) {
  for (int vector = 0; vector < step.num_vectors; ++vector) {
    if (step.dropout.threshold > 0) {
      softmax_gradient_of<true>(step, vector);
    } else {
      softmax_gradient_of<false>(step, vector);
    }
  }
}

HWY_ATTR inline void chain(const float* gradients, const float* derivatives, std::int64_t count,
                           float factor, float* out) {
  const FloatTag d;
  const FloatVector f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < count; i += kVectorLanes) {
    const FloatVector g = hn::Load(d, gradients + i);
    const FloatVector product = hn::Mul(hn::Mul(g, hn::Load(d, derivatives + i)), f);
    hn::Store(hn::IfThenZeroElse(hn::Eq(g, hn::Zero(d)), product), d, out + i);
  }
}

/// kKeys keys, kVectors vectors of their sums.
template <int kKeys, int kVectors>
HWY_ATTR HWY_INLINE void sum_block(const float* HWY_RESTRICT weights, std::int64_t num_rows,
                                   const float* HWY_RESTRICT rows, std::int64_t pitch,
                                   float* HWY_RESTRICT sums) {
  const FloatTag d;
  FloatVector sum[kKeys][kVectors];
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[k][v] = hn::LoadU(d, sums + k * pitch + v * kVectorLanes);
  }
  for (std::int64_t row = 0; row < num_rows; ++row) {
    FloatVector x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] = hn::LoadU(d, rows + row * pitch + v * kVectorLanes);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const FloatVector weight = hn::Set(d, weights[k * kPanelLanes + row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[k][v] = hn::MulAdd(weight, x[v], sum[k][v]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      hn::StoreU(sum[k][v], d, sums + k * pitch + v * kVectorLanes);
  }
}

/// The last keys, fewer than a block.
template <int kKeys, int kVectors>
HWY_ATTR inline void sum_tail(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                              const float* rows, std::int64_t pitch, float* sums) {
  if constexpr (kKeys > 0) {
    if (num_keys == kKeys) {
      sum_block<kKeys, kVectors>(weights, num_rows, rows, pitch, sums);
    } else {
      sum_tail<kKeys - 1, kVectors>(weights, num_keys, num_rows, rows, pitch, sums);
    }
  }
}

template <int kVectors>
HWY_ATTR inline void sum_columns(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                                 const float* rows, std::int64_t pitch, float* sums) {
  constexpr int kKeys = sum_keys(kVectors);
  std::int64_t key = 0;
  for (; key + kKeys <= num_keys; key += kKeys) {
    sum_block<kKeys, kVectors>(weights + key * kPanelLanes, num_rows, rows, pitch,
                               sums + key * pitch);
  }
  sum_tail<kKeys - 1, kVectors>(weights + key * kPanelLanes, num_keys - key, num_rows, rows, pitch,
                                sums + key * pitch);
}

HWY_ATTR inline void accumulate_rows(const float* weights, std::int64_t num_keys,
                                     std::int64_t num_rows, const void* rows, std::int64_t head_dim,
                                     float* sums) {
  const std::int64_t pitch = row_pitch(head_dim);
  std::int64_t vectors = (head_dim + kVectorLanes - 1) / kVectorLanes;
  for (std::int64_t done = 0; vectors > 0;) {
    // Blocks of even width: 5 vectors are 3 and 2, not 4 and 1.
    const std::int64_t blocks = (vectors + kSumVectors - 1) / kSumVectors;
    const std::int64_t width = (vectors + blocks - 1) / blocks;
    const float* from = static_cast<const float*>(rows) + done * kVectorLanes;
    float* to = sums + done * kVectorLanes;
    switch (width) {
      case 1:
        sum_columns<1>(weights, num_keys, num_rows, from, pitch, to);
        break;
      case 2:
        sum_columns<2>(weights, num_keys, num_rows, from, pitch, to);
        break;
      case 3:
        sum_columns<HWY_MIN(3, kSumVectors)>(weights, num_keys, num_rows, from, pitch, to);
        break;
      default:
        sum_columns<kSumVectors>(weights, num_keys, num_rows, from, pitch, to);
    }
    done += width;
    vectors -= width;
  }
}

HWY_ATTR inline void add_columns(const float* columns, std::int64_t num_rows, std::int64_t count,
                                 float* const* to, std::int64_t col_stride) {
  std::int64_t row = 0;
#if HWY_TARGET != HWY_SCALAR
  const QuadTag d;
  for (; col_stride == 1 && row + 4 <= num_rows; row += 4) {
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
      hn::Vec<QuadTag> quads[4];
      for (int k = 0; k < 4; ++k) quads[k] = hn::LoadU(d, columns + (i + k) * kPanelLanes + row);
      transpose(quads);
      for (int k = 0; k < 4; ++k) {
        float* at = to[row + k] + i;
        hn::StoreU(hn::Add(hn::LoadU(d, at), quads[k]), d, at);
      }
    }
    for (; i < count; ++i) {
      for (int k = 0; k < 4; ++k) to[row + k][i] += columns[i * kPanelLanes + row + k];
    }
  }
#endif
  for (; row < num_rows; ++row) {
    for (std::int64_t i = 0; i < count; ++i)
      to[row][i * col_stride] += columns[i * kPanelLanes + row];
  }
}

HWY_ATTR inline double product(const GradientRow& a, const GradientRow& b, std::int64_t count) {
  constexpr std::int64_t kChunk = 64;
  HWY_ALIGN float x[kChunk];
  HWY_ALIGN float y[kChunk];
  double sum = 0;
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t size = HWY_MIN(kChunk, count - begin);
    convert_row(a.at(begin), a.dtype, a.col_stride, size, x);
    convert_row(b.at(begin), b.dtype, b.col_stride, size, y);
    double parts[4] = {0, 0, 0, 0};
    std::int64_t i = 0;
    for (; i + 4 <= size; i += 4) {
      for (int k = 0; k < 4; ++k) parts[k] += static_cast<double>(x[i + k]) * y[i + k];
    }
    for (; i < size; ++i) parts[0] += static_cast<double>(x[i]) * y[i];
    sum += (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  return sum;
}

inline const GradientKernels& f32_gradient_kernels() {
  static constexpr GradientKernels kKernels{
      .row_pitch = row_pitch,
      .row_bytes = row_bytes,
      .product = product,
      .pack_rows = pack_rows,
      .softmax_gradient = softmax_gradient,
      .chain = chain,
      .accumulate_rows = accumulate_rows,
      .add_columns = add_columns,
      .add_queries = add_columns,
  };
  return kKernels;
}

}  // namespace fovea::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
