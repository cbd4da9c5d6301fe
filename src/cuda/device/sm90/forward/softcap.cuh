// Scores with a cap, c tanh(scale s / c), in logarithms to base 2 and less a row's base: what ex2 takes. Called by
// scores.cuh.
//
//   u = scale s / c
//   |u| <= 5/8    s P(s^2), odd and of degree 9; terms hold scale, c and log2 e, and the last fma subtracts the base:
//                 six instructions
//   beyond        c - 2 c / (1 + e^(2u)), which has no small results there
//
// Relative errors below 1.25 2^-21 with all roundings. Where a warp's vote finds all its scores of a tile in the first
// range, they take the polynomial; else both are computed and each score takes its own, so that its bits do not depend
// on its neighbours. A seventh instruction finds the largest; it is of the kind that does not hinder a busy tensor
// core.
#pragma once

#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"

namespace fovea::cuda::sm90 {

struct Softcap {
  static constexpr float kBound = 0.625F;  // of |u|
  static constexpr int kTerms = 5;

  float prescale;      // 1, unless powers of scale / c might leave the range of floats
  float bound;         // of |s|, for the polynomial
  float term[kTerms];  // of s, s^3, ...
  float rate;          // e^(2u) = 2^(rate s)
  float cap;           // c log2 e

  /// Caps of any finite size: below 2^-100 scores are 0 or as good as that, beyond 2^100 they stay what they are.
  FOVEA_DEVICE Softcap of(float c, float scale) {
    // Minimax of the relative error of tanh u / u in u^2: 2^-23.
    constexpr float kTanh[kTerms] = {0x1.fffffcp-1F, -0x1.5551b8p-2F, 0x1.107a08p-3F,
                                     -0x1.a88654p-5F, 0x1.ed307ap-7F};
    const float size = ptx::min_ftz(ptx::max_ftz(ptx::abs_ftz(c), 0x1p-100F), 0x1p+100F);
    Softcap made;
    float ratio = ptx::div_rn(scale, size);
    const float magnitude = ptx::abs_ftz(ratio);
    made.prescale = magnitude >= 0x1p-10F && magnitude <= 0x1p+10F ? 1.0F : ratio;
    if (made.prescale != 1.0F) ratio = 1.0F;
    made.cap = c - c == 0.0F ? kLog2E * size : c - c;  // NaN where c is NaN or infinite
    made.bound = kBound * ptx::rcp_approx_ftz(ptx::abs_ftz(ratio));
    made.rate = 2.0F * kLog2E * ratio;
    float power = made.cap * ratio;
#pragma unroll
    for (int i = 0; i < kTerms; ++i, power *= ratio * ratio) made.term[i] = kTanh[i] * power;
    return made;
  }

  /// Of one.
  FOVEA_DEVICE_MEMBER float of_score(float s, float base) const {
    if (prescale != 1.0F) s *= prescale;
    return ptx::abs_ftz(s) <= bound ? of_small(s, base) : of_large(s, base);
  }

  /// base: of a thread's two rows, as fragments hold them.
  template <int n>
  FOVEA_DEVICE_MEMBER void apply(float (&s)[n], const float (&base)[2]) const {
    if (prescale != 1.0F) {
#pragma unroll
      for (float& x : s) x *= prescale;
    }
    if (!ptx::vote_any(!(greatest(s) <= bound))) {
#pragma unroll
      for (int i = 0; i < n; ++i) s[i] = of_small(s[i], base[i / 2 % 2]);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float b = base[i / 2 % 2];
        s[i] = ptx::abs_ftz(s[i]) <= bound ? of_small(s[i], b) : of_large(s[i], b);
      }
    }
  }

 private:
  /// Of the absolute values.
  template <int n>
  FOVEA_DEVICE float greatest(const float (&s)[n]) {
    float top[4] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) top[i % 4] = ptx::max_ftz(top[i % 4], ptx::abs_ftz(s[i]));
    return ptx::max_ftz(ptx::max_ftz(top[0], top[1]), ptx::max_ftz(top[2], top[3]));
  }

  FOVEA_DEVICE_MEMBER float of_small(float s, float base) const {
    const float s2 = ptx::mul_rn(s, s);
    float sum = term[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = ptx::fma_rn(s2, sum, term[i]);
    return ptx::fma_rn(s, sum, -base);
  }

  FOVEA_DEVICE_MEMBER float of_large(float s, float base) const {
    const float power = ptx::ex2_approx_ftz(ptx::mul_rn(rate, s));
    return ptx::fma_rn(-2.0F * cap, ptx::rcp_approx_ftz(ptx::add_rn(1.0F, power)), cap - base);
  }
};

/// The same by tanh.approx: three instructions, one of them of the special function unit, and right to 2^-11 of the
/// score. In units of an `octave`.
struct ApproximateSoftcap {
  float rate;  // of a product, in caps
  float cap;   // in logarithms to base 2

  /// Caps as Softcap has them.
  FOVEA_DEVICE ApproximateSoftcap of(float c, float scale, float octave) {
    const float size = ptx::min_ftz(ptx::max_ftz(ptx::abs_ftz(c), 0x1p-100F), 0x1p+100F);
    return {ptx::div_rn(scale, size), octave * (c - c == 0.0F ? kLog2E * size : c - c)};
  }

  FOVEA_DEVICE_MEMBER float of_product(float product, float none) const {
    return of_fraction(product * rate, none);
  }

  /// Sums of a thread's two rows, as fragments hold them, that times `factor` and more by `added` are products. `none`:
  /// what 0 comes as.
  template <int n>
  FOVEA_DEVICE_MEMBER void apply(float (&s)[n], const float (&factor)[2], const float (&added)[2],
                                 const float (&none)[2]) const {
    const float slope[2] = {factor[0] * rate, factor[1] * rate};
    const float first[2] = {added[0] * rate, added[1] * rate};
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int r = i / 2 % 2;
      s[i] = of_fraction(ptx::fma_rn(s[i], slope[r], first[r]), none[r]);
    }
  }

 private:
  FOVEA_DEVICE_MEMBER float of_fraction(float u, float none) const {
    return ptx::fma_rn_ftz(ptx::tanh_approx(u), cap, none);
  }
};

}  // namespace fovea::cuda::sm90
