// What the softmax keeps of the row that a thread has, and powers of its scores: common/optimistic_softmax.cuh says by
// which rules. A whole row in one thread: no shuffles, and P goes where it is made, 16 keys at a time.
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
#include "ptx/math_f32x2.cuh"
#include "ptx/ordered.cuh"
#include "ptx/warp.cuh"
#include "sm100/forward/cta.cuh"
#include "sm90/forward/score_unit.cuh"

namespace fovea::cuda::sm100 {

FOVEA_DEVICE ptx::F32x2 both(float x) { return {x, x}; }

/// 2^x of two: 0 below -126.5, infinity above 127.5, NaN of NaN.
FOVEA_DEVICE ptx::F32x2 exp2_by_polynomial(ptx::F32x2 x) {
  // Minimax of the relative error on [-1/2, 1/2].
  constexpr float kTerms[] = {0x1.000002p+0F, 0x1.62e428p-1F, 0x1.ebf918p-3F,
                              0x1.c6b6e4p-5F, 0x1.3d0c52p-7F, 0x1.5c08e6p-10F};
  // What f32x2 has no operand modifier for: minus x, in range; and differences as fmas, exact like them.
  const ptx::F32x2 minus_x{ptx::max_nan(-ptx::max_nan(x.x, -127.0F), -128.0F),
                           ptx::max_nan(-ptx::max_nan(x.y, -127.0F), -128.0F)};
  const auto less = [](ptx::F32x2 of, ptx::F32x2 by) {
    return ptx::fma_rn_ftz_f32x2(by, both(-1.0F), of);
  };
  const ptx::F32x2 rounded = less(both(kIntegerOrigin), minus_x);
  const ptx::F32x2 minus_n = less(both(kIntegerOrigin), rounded);
  const ptx::F32x2 f = less(minus_n, minus_x);
  ptx::F32x2 sum = both(kTerms[5]);
#pragma unroll
  for (int i = 4; i >= 0; --i) sum = ptx::fma_rn_ftz_f32x2(sum, f, both(kTerms[i]));
  // Bits of 2^n: 0 at n = -127, infinity at 128.
  const auto power = [](float origin_and_n) {
    return ptx::bit_cast<float>((ptx::bit_cast<std::uint32_t>(origin_and_n) << 23U) + 0x3f800000U);
  };
  return ptx::mul_rn_f32x2(sum, {power(rounded.x), power(rounded.y)});
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
  static constexpr int kChunk = 16;  // keys, whose P is stored at once
  static_assert(spec.polynomial_keys % 2 == 0, "keys have their powers by twos");
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
    ptx::F32x2 parts[2] = {};
    float first = 0;  // power of a chunk
#pragma unroll
    for (int chunk = 0; chunk < kKeys / kChunk; ++chunk) {
      std::uint32_t packed[kChunk / 2];
      // A chunk waits for a power of the one before: else ptxas hoists all of them, and has too few registers.
      if (chunk > 0) shift = ptx::ordered_fma_rn_ftz(first, zero, shift);
#pragma unroll
      for (int i = 0; i < kChunk; i += 2) {
        const ptx::F32x2 pair = powers(chunk * kChunk + i, s, unit, shift);
        if (i == 0) first = pair.x;
        parts[i / 2 % 2] = ptx::add_rn_f32x2(parts[i / 2 % 2], pair);
        packed[i / 2] = pack(pair);
      }
      store(chunk, packed);
    }
    return (parts[0].x + parts[0].y) + (parts[1].x + parts[1].y);
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

  /// Of two neighbouring keys.
  FOVEA_DEVICE ptx::F32x2 powers(int key, const Scores& s, float unit, float shift) {
    const ptx::F32x2 argument =
        ptx::fma_rn_ftz_f32x2({s[key], s[key + 1]}, both(unit), both(shift));
    // The last ones: a chunk begins with ex2, which takes longer.
    if (key % 16 >= 16 - spec.polynomial_keys) return exp2_by_polynomial(argument);
    return {ptx::ex2_approx_ftz(argument.x), ptx::ex2_approx_ftz(argument.y)};
  }

  FOVEA_DEVICE std::uint32_t pack(ptx::F32x2 pair) {
    if constexpr (spec.element == Element::bf16) return ptx::cvt_bf16x2(pair.x, pair.y);
    return ptx::cvt_f16x2(pair.x, pair.y);
  }
};

}  // namespace fovea::cuda::sm100
