// The vector work between tile products: scores of one strip of keys become pairs of probabilities.
//
// The arithmetic is that of softmax_of (panel-inl.hpp) and exp2_nonpositive (math-inl.hpp), operation by operation: a
// tile that goes step by step and one that goes through here give the same bits.
//
// Bound: per 16 scores 1 operation for the maximum, 1 subtraction, 11 of the exponential, 1 for the sum, 2 to round and
// interleave pairs, on two ports: 8 cycles.
#pragma once

#if defined(__x86_64__)

#include <cstdint>
#include <limits>

#include "cpu/kernels/amx.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/kernels/panel_bf16.hpp"

namespace fovea::cpu::amx {

inline constexpr std::int64_t kStripKeys = kSubTileKeys;
inline constexpr std::int64_t kStripPairs = kStripKeys / 2;
inline constexpr int kVectors = 3;  // of a panel
inline constexpr std::int64_t kVectorLanes = 16;

// As in math-inl.hpp and panel-inl.hpp.
inline constexpr float kZeroPower = -100.0F;
inline constexpr float kRoundingShift = 12582912.0F - kZeroPower;
inline constexpr float kMaxGrowth = 8.0F;

FOVEA_AMX_INLINE __m512 nothing() {
  return _mm512_set1_ps(-std::numeric_limits<float>::infinity());
}

/// 2^(x * factor) for products up to 127.
class Exponential {
 public:
  FOVEA_AMX_INLINE explicit Exponential(float scale_log2)
      : factor_(_mm512_set1_ps(scale_log2)),
        lowest_(_mm512_set1_ps(kZeroPower / scale_log2)),
        shift_(_mm512_set1_ps(kRoundingShift)) {}

  /// Of factors of rows.
  FOVEA_AMX_INLINE explicit Exponential(__m512 scale_log2)
      : factor_(scale_log2),
        lowest_(_mm512_div_ps(_mm512_set1_ps(kZeroPower), scale_log2)),
        shift_(_mm512_set1_ps(kRoundingShift)) {}

  FOVEA_AMX_INLINE __m512 operator()(__m512 x) const {
    const __m512 limited = _mm512_max_ps(lowest_, x);  // NaN stays
    const __m512 shifted = _mm512_fmadd_ps(limited, factor_, shift_);
    const __m512 f = _mm512_fmsub_ps(limited, factor_, _mm512_sub_ps(shifted, shift_));
    const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23));
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(0x1.5bba14p+17F), _mm512_set1_ps(0x1.3cea88p+20F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c6b752p+22F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebf9bcp+24F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e42ap+26F));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1p+27F));
    return _mm512_mul_ps(p, power);
  }

  FOVEA_AMX_INLINE __m512 factor() const { return factor_; }

 private:
  __m512 factor_, lowest_, shift_;
};

/// Pairs of two keys' probabilities: p as the sum of kParts bf16, each in a place of its own.
template <int kParts>
FOVEA_AMX_INLINE void store_pairs(__m512 first, __m512 second, std::uint32_t* to,
                                  std::int64_t part_stride) {
#pragma GCC unroll 3
  for (int part = 0; part < kParts; ++part) {
    const __m512i pairs = bf16::round_pairs(first, second);
    _mm512_store_si512(to + part * part_stride, pairs);
    if (part + 1 == kParts) break;
    first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    const __m512i high = _mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000));
    second = _mm512_sub_ps(second, _mm512_castsi512_ps(high));
  }
}

/// The softmax of one panel's part of a tile, relative to origins that stay. Registers hold what all its strips share.
template <int kParts>
class StripSoftmax {
 public:
  FOVEA_AMX_INLINE StripSoftmax(const PanelState& state, float scale_log2, std::int64_t part_stride)
      : exponential_(scale_log2), part_stride_(part_stride) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      max_[v] = _mm512_load_ps(state.row_max + v * kVectorLanes);
      sum_[v] = _mm512_load_ps(state.row_sum + v * kVectorLanes);
      // A row that sees nothing counts from 0, so that all its terms are 2^-inf = 0.
      const __m512 origin = _mm512_load_ps(state.origin + v * kVectorLanes);
      const __mmask16 is_some = _mm512_cmp_ps_mask(origin, nothing(), _CMP_NEQ_UQ);
      origin_[v] = _mm512_maskz_mov_ps(is_some, origin);
    }
  }

  /// kStripKeys keys, to be done in about num_gaps calls of fill_gap.
  FOVEA_AMX_INLINE void start_strip(const float* scores, std::uint32_t* pairs,
                                    std::int64_t num_gaps) {
    scores_ = scores;
    pairs_ = pairs;
    num_gaps_ = static_cast<std::int32_t>(num_gaps);
    credit_ = 0;
    remaining_ = kStripPairs;
  }
  FOVEA_AMX_INLINE void fill_gap() {
    for (credit_ += kStripPairs; credit_ >= num_gaps_; credit_ -= num_gaps_) next_pair();
  }
  FOVEA_AMX_INLINE void finish_strip() {
    while (remaining_ > 0) next_pair();
  }

  /// May the origins stay, given the maxima?
  FOVEA_AMX_INLINE bool keeps_origins() const {
    const __m512 most = _mm512_set1_ps(kMaxGrowth);
    unsigned keeps = 0xffffU;
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const __m512 growth =
          _mm512_mul_ps(_mm512_sub_ps(max_[v], origin_[v]), exponential_.factor());
      keeps &= _mm512_cmp_ps_mask(growth, most, _CMP_LE_OQ);
    }
    return keeps == 0xffffU;
  }

  FOVEA_AMX_INLINE void store(const PanelState& state) const {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      _mm512_store_ps(state.row_max + v * kVectorLanes, max_[v]);
      _mm512_store_ps(state.row_sum + v * kVectorLanes, sum_[v]);
    }
  }

 private:
  FOVEA_AMX_INLINE void next_pair() {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const __m512 first = _mm512_load_ps(scores_ + v * kVectorLanes);
      const __m512 second = _mm512_load_ps(scores_ + bf16::kLanes + v * kVectorLanes);
      max_[v] = _mm512_max_ps(second, _mm512_max_ps(first, max_[v]));
      const __m512 p = exponential_(_mm512_sub_ps(first, origin_[v]));
      const __m512 q = exponential_(_mm512_sub_ps(second, origin_[v]));
      sum_[v] = _mm512_add_ps(_mm512_add_ps(sum_[v], p), q);
      store_pairs<kParts>(p, q, pairs_ + v * kVectorLanes, part_stride_);
    }
    scores_ += 2 * bf16::kLanes;
    pairs_ += bf16::kLanes;
    --remaining_;
  }

  Exponential exponential_;
  __m512 max_[kVectors], sum_[kVectors], origin_[kVectors];
  const float* scores_ = nullptr;
  std::uint32_t* pairs_ = nullptr;
  const std::int64_t part_stride_;
  std::int32_t num_gaps_ = 0, credit_ = 0, remaining_ = 0;
};

/// Are there terms in every lane's sums? Before, no origin can stay.
FOVEA_AMX_INLINE bool has_origins(const PanelState& state) {
  unsigned none = 0;
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) {
    const __m512 origin = _mm512_load_ps(state.origin + v * kVectorLanes);
    none |= _mm512_cmp_ps_mask(origin, nothing(), _CMP_EQ_OQ);
  }
  return none == 0;
}

/// Maxima of num_keys scores, the origins that follow from them, and sums relative to these.
FOVEA_AMX_INLINE void move_origins(const float* scores, std::int64_t num_keys, float scale_log2,
                                   const PanelState& state) {
  const Exponential exponential(scale_log2);
  const __m512 most = _mm512_set1_ps(kMaxGrowth);
  __m512 row_max[kVectors];
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) row_max[v] = _mm512_load_ps(state.row_max + v * kVectorLanes);
  for (std::int64_t key = 0; key < num_keys; ++key) {
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) {
      const __m512 s = _mm512_load_ps(scores + key * bf16::kLanes + v * kVectorLanes);
      row_max[v] = _mm512_max_ps(s, row_max[v]);
    }
  }
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) {
    float* const origin = state.origin + v * kVectorLanes;
    float* const sum = state.row_sum + v * kVectorLanes;
    const __m512 before = _mm512_load_ps(origin);
    const __m512 growth = _mm512_mul_ps(_mm512_sub_ps(row_max[v], before), exponential.factor());
    const __mmask16 keeps = _mm512_cmp_ps_mask(growth, most, _CMP_LE_OQ);
    const __m512 after = _mm512_mask_blend_ps(keeps, row_max[v], before);
    const __mmask16 is_some = _mm512_cmp_ps_mask(after, nothing(), _CMP_NEQ_UQ);
    const __m512 shift = _mm512_sub_ps(before, _mm512_maskz_mov_ps(is_some, after));
    // Where there was no origin, sums are 0 and stay it.
    const __mmask16 is_moved = _mm512_cmp_ps_mask(before, after, _CMP_NEQ_UQ) &
                               _mm512_cmp_ps_mask(before, nothing(), _CMP_NEQ_UQ);
    const __m512 rescale = _mm512_mask_blend_ps(is_moved, _mm512_set1_ps(1.0F), exponential(shift));
    _mm512_store_ps(state.row_max + v * kVectorLanes, row_max[v]);
    _mm512_store_ps(origin, after);
    _mm512_store_ps(state.rescale + v * kVectorLanes, rescale);
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale));
  }
}

}  // namespace fovea::cpu::amx

#endif
