// Rows whose scores are products of codes with so large a unit that the softmax could not take their origin and their
// reference off exactly (common/code_units.cuh): scores of some 10^5 and more. Called by compute.cuh where it computes
// row tiles again, behind the mask.
//
//   s' = s - base,  in 2^-12 of an octave, above the same origin          base: the row's greatest score, or near it
//
// Each score is rounded once, as the greatest is, and what follows sees a row like others: a reference counts from the
// base, and so does what row_max keeps. In the end the base joins q · μ, which lse lacks already.
#pragma once

#include "common/code_units.cuh"
#include "common/float_constants.cuh"
#include "common/quad_reduce.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm90/forward/code_scores.cuh"
#include "sm90/forward/cta.cuh"
#include "sm90/forward/query_codes.cuh"

namespace fovea::cuda::sm90 {

/// Of one thread: two rows of a row tile, whose queries are in this stage.
template <Sm90ForwardSpec spec, class Rows>
struct FarRows {
  using Scores = typename Rows::Scores;
  static constexpr int kScores = spec.tile_kv / 2;
  static constexpr float kUnit = 0x1p-12F;
  /// So far below its base a score is as good as any that is lower: nothing. A base stays until scores are half as far
  /// above.
  static constexpr float kReach = 512.0F;

  const ComputingWarp<spec>& warp;
  const int stage;
  bool is_far[2];
  float base[2] = {};  // log2

  FOVEA_DEVICE_MEMBER FarRows(const ComputingWarp<spec>& of_warp, int q_stage,
                              const CodeScores<spec>& codes)
      : warp(of_warp), stage(q_stage) {
    const QueryCodes<spec> queries{warp, stage};
#pragma unroll
    for (int r = 0; r < 2; ++r) is_far[r] = queries.is_far(codes.row_scale[r]);
  }

  /// What a kv tile's scores and their rows count from.
  FOVEA_DEVICE_MEMBER void rebase(Scores& s, Rows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = next_base(r, greatest(r, s, rows.unit[r]), rows.reference[r]);
      const float growth = is_far[r] ? next - base[r] : 0.0F;
      take_off(r, s, rows.unit[r], next);
      if (is_far[r]) base[r] = next, rows.unit[r] = kUnit;
      rows.reference[r] -= growth;
      if constexpr (spec.wants_row_max) rows.greatest[r] -= growth;
    }
  }

  /// Behind the last tile. The lanes that hold a row have the same base.
  FOVEA_DEVICE_MEMBER void add_to_what_lse_lacks() const {
    ptx::sync_warp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_far[r] || warp.cta.lane % 4 != 0) continue;
      const SharedAddress lacks = warp.cta.of_mean_at(stage, warp.row(r));
      const float of_base = ptx::div_rn(base[r], warp.cta.p.common.softmax_scale_log2);
      ptx::st_shared(lacks, ptx::ld_shared<float>(lacks) + of_base);
    }
    ptx::sync_warp();
  }

 private:
  /// Of the row, in all its lanes.
  FOVEA_DEVICE_MEMBER float greatest(int r, const Scores& s, float unit) const {
    float top = s[2 * r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) top = ptx::max_ftz(top, ptx::max_ftz(s[i], s[i + 1]));
    return quad_max(logarithm(top, unit));
  }

  FOVEA_DEVICE float logarithm(float score, float unit) {
    return ptx::mul_rn(score - kIntegerOrigin, unit);
  }

  /// A row that has seen no key, and sees none in this tile, counts from where it did.
  FOVEA_DEVICE_MEMBER float next_base(int r, float top, float reference) const {
    if (top == -infinity()) return base[r];
    const bool has_base = reference > -infinity();
    return has_base && top - base[r] <= kReach / 2 ? base[r] : top;
  }

  /// What is hidden stays, and what is NaN.
  FOVEA_DEVICE_MEMBER void take_off(int r, Scores& s, float unit, float from) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 2 % 2 != r) continue;
      float x = logarithm(s[i], unit) - from;
      x = x < -kReach && s[i] > -infinity() ? -kReach : x;
      s[i] = is_far[r] ? ptx::fma_rn(x, 1.0F / kUnit, kIntegerOrigin) : s[i];
    }
  }
};

}  // namespace fovea::cuda::sm90
