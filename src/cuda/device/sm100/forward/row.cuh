// What the softmax keeps of the row that a thread has, and powers of its scores: common/optimistic_softmax.cuh says by
// which rules. A whole row in one thread: no shuffles, and P goes where it is made, 32 keys at a time.
//
// Powers of 2. ex2 gives 16 a clock and SM on sm_100, half as many as a product of 128 columns wants beside the rest.
// Some keys of each 16, always the same ones, have theirs from a polynomial instead, so that a row's bits do not depend
// on what is masked beside it (and packed and padded batches agree).
//
//   2^x = 2^n p(x - n)     n the nearest integer, |x - n| <= 1/2, p of degree 5: relative error 2^-23.6, ex2's is 2^-22
#pragma once

#include "common/float_constants.cuh"
#include "common/optimistic_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/ordered.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm90/forward/score_unit.cuh"

namespace fovea::cuda::sm100 {

/// 2^x: 0 below -126.5, infinity above 127.5, NaN of NaN.
FOVEA_DEVICE float exp2_by_polynomial(float x) {
  // Minimax of the relative error on [-1/2, 1/2].
  constexpr float kTerms[] = {0x1.000002p+0F, 0x1.62e428p-1F, 0x1.ebf918p-3F,
                              0x1.c6b6e4p-5F, 0x1.3d0c52p-7F, 0x1.5c08e6p-10F};
  const float limited = -ptx::max_nan(-ptx::max_nan(x, -127.0F), -128.0F);
  const float rounded = ptx::add_rn(limited, kIntegerOrigin);
  const float f = ptx::add_rn(limited, -ptx::add_rn(rounded, -kIntegerOrigin));
  float sum = kTerms[5];
#pragma unroll
  for (int i = 4; i >= 0; --i) sum = ptx::fma_rn_ftz(sum, f, kTerms[i]);
  // Bits of 2^n: 0 at n = -127, infinity at 128.
  const std::uint32_t power = (ptx::bit_cast<std::uint32_t>(rounded) << 23U) + 0x3f800000U;
  return ptx::mul_rn(sum, ptx::bit_cast<float>(power));
}

template <Sm100ForwardSpec spec, class Mods>
using RowState = OptimisticRows<spec.element, spec.tile_kv, spec.head_dim_v, spec.wants_row_max,
                                sm90::ScoreUnit<spec, Mods>::kIsLog2 && !spec.wants_row_max,
                                Mods::has_score && !sm90::ScoreUnit<spec, Mods>::kIsLog2, false, 1>;

template <Sm100ForwardSpec spec, class Mods>
struct Row : RowState<spec, Mods> {
  using State = RowState<spec, Mods>;
  using H = typename State::H;
  static constexpr int kKeys = spec.tile_kv;
  static constexpr int kChunk = 32;  // keys, whose P is stored at once
  using Scores = float[kKeys];
  /// Rows are computed again whose sums of p v come to less than this in all (OptimisticRows::kLeastSum says why).
  static constexpr float kLeastSum = H::kCanSoften ? spec.head_dim_v * 0x1p-110F : 0.0F;

  /// Maximum first: as OptimisticRows::raise.
  FOVEA_DEVICE_MEMBER bool raise(bool is_first, const Scores& s, float c, bool is_low) {
    float top[1] = {greatest_of(s)};
    return is_first ? State::template raise_to<true>(top, c, is_low)
                    : State::template raise_to<false>(top, c, is_low);
  }

  /// The sum of P; store(chunk, P of its keys, two a word) takes it as it is made. `zero`: see Sm90ForwardParams.
  template <class Store>
  FOVEA_DEVICE_MEMBER float exponentiate(const Scores& s, float c, float zero,
                                         Store&& store) const {
    const float reference = this->reference[0];
    const float unit = this->factor_of(0, c);
    float shift = reference == -infinity() ? 0.0F : this->base[0] - reference;
    float parts[4] = {};
    float first = 0;  // power of a chunk
#pragma unroll
    for (int chunk = 0; chunk < kKeys / kChunk; ++chunk) {
      std::uint32_t packed[kChunk / 2];
      // A chunk waits for a power of the one before: else ptxas hoists all of them, and has too few registers.
      if (chunk > 0) shift = ptx::ordered_fma_rn_ftz(first, zero, shift);
#pragma unroll
      for (int i = 0; i < kChunk; i += 2) {
        const float lo = power(chunk * kChunk + i, s, unit, shift);
        const float hi = power(chunk * kChunk + i + 1, s, unit, shift);
        if (i == 0) first = lo;
        parts[i % 4] += lo;
        parts[i % 4 + 1] += hi;
        packed[i / 2] = pack(lo, hi);
      }
      store(chunk, packed);
    }
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }

  /// Of powers that sum to `part`: may they stand? Not where the row had seen no key.
  FOVEA_DEVICE_MEMBER bool stands(float part) const {
    return part <= H::kSoft && this->reference[0] != -infinity();
  }

  /// Where they do not: could scores be too far above the reference? NaN among them is.
  FOVEA_DEVICE_MEMBER bool must_redo(float part) const {
    return !H::kCanSoften || !(part <= H::kHard) || this->reference[0] == -infinity();
  }

  /// m rises by whole octaves where `part` exceeds 2^kSoft. Whether it did.
  FOVEA_DEVICE_MEMBER bool soften(float part) {
    if constexpr (!H::kCanSoften) return false;
    const int octaves = State::octaves_above(part);
    this->factor[0] = ptx::bit_cast<float>(static_cast<std::uint32_t>(127 - octaves) << 23U);
    this->reference[0] += static_cast<float>(octaves);
    this->sum[0] *= this->factor[0];
    return octaves != 0;
  }

 private:
  FOVEA_DEVICE float greatest_of(const Scores& s) {
    float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int i = 4; i < kKeys; ++i) top[i % 4] = ptx::max_ftz(top[i % 4], s[i]);
    return ptx::max_ftz(ptx::max_ftz(top[0], top[1]), ptx::max_ftz(top[2], top[3]));
  }

  FOVEA_DEVICE float power(int key, const Scores& s, float unit, float shift) {
    const float argument = ptx::fma_rn_ftz(s[key], unit, shift);
    // The last ones: a chunk begins with ex2, which takes longer.
    if (key % 16 >= 16 - spec.polynomial_keys) return exp2_by_polynomial(argument);
    return ptx::ex2_approx_ftz(argument);
  }

  FOVEA_DEVICE std::uint32_t pack(float lo, float hi) {
    if constexpr (spec.element == Element::bf16) return ptx::cvt_bf16x2(lo, hi);
    return ptx::cvt_f16x2(lo, hi);
  }
};

}  // namespace fovea::cuda::sm100
