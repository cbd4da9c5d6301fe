// Splits of a row made one state, in their order: a group (shared/split.h). By the CTA that has computed them all, or
// by the combine kernel, where each is another CTA's: the same steps, so the same bits.
//
//   top' = max(top, lse_s),  O' = exp(top - top') O + exp(lse_s - top') O_s,  l' the same of l and 1
//
// An online softmax whose scores are lse of splits and whose values are their outputs.
#pragma once

#include "common/online_softmax.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace fovea::cuda {

/// exp(lse - top); 0 for a split that saw no key.
FOVEA_DEVICE float weight_of(float lse, float top) {
  return lse == -infinity() ? 0.0F : ptx::ex2_approx_ftz((lse - top) * kLog2E);
}

FOVEA_DEVICE bool is_finite(float x) { return x - x == 0.0F; }

/// Of a part that weighs nothing beside `sum`, infinity and NaN count all the same.
FOVEA_DEVICE ptx::F32x4 with_non_finite(const ptx::F32x4& sum, const ptx::F32x4& part) {
  return {is_finite(part.x) ? sum.x : sum.x + part.x, is_finite(part.y) ? sum.y : sum.y + part.y,
          is_finite(part.z) ? sum.z : sum.z + part.z, is_finite(part.w) ? sum.w : sum.w + part.w};
}

/// Factors of what is folded already and of the next split.
struct FoldStep {
  float kept, added;
  bool is_seen;  // the split saw a key
};

/// top: of lse of the splits before; greatest: of this one's too; beside: what the split leaves beside lse
/// (beside_lse).
FOVEA_DEVICE FoldStep fold_step(float top, float greatest, float lse, float beside) {
  const bool is_seen = lse != -infinity();
  // Where lse is the maximum itself, those that have it count by their sums; all others weigh nothing.
  if (is_huge(greatest))
    return {top == greatest ? 1.0F : 0.0F,
            lse == greatest ? ptx::ex2_approx_ftz(beside * kLog2E) : 0.0F, is_seen};
  return {weight_of(top, greatest), weight_of(lse, greatest), is_seen};
}

/// A split's maximum, from what it leaves.
FOVEA_DEVICE float max_of_split(float lse, float beside) { return is_huge(lse) ? lse : beside; }

FOVEA_DEVICE float max_or_nan(float a, float b) {
  return is_nan(a) || is_nan(b) ? quiet_nan() : ptx::max_ftz(a, b);
}

/// Splits of a row so far, but for their sums.
struct FoldedSplits {
  float top = -infinity();
  float sum = 0;  // relative to top
  float row_max = -infinity();

  FOVEA_DEVICE_MEMBER FoldStep add(float lse, float beside) {
    const float greatest = ptx::max_ftz(top, lse);
    const FoldStep step = fold_step(top, greatest, lse, beside);
    sum = ptx::fma_rn(step.kept, sum, step.added);
    top = greatest;
    row_max = max_or_nan(row_max, max_of_split(lse, beside));
    return step;
  }

  FOVEA_DEVICE_MEMBER RowResult result() const { return finish_row({top, sum}, 1.0F, -infinity()); }
};

/// Four columns of the sums: NaN where infinity or NaN meets a factor of 0.
FOVEA_DEVICE ptx::F32x4 fold_finite(const ptx::F32x4& sums, const FoldStep& step,
                                    const ptx::F32x4& part) {
  return {ptx::fma_rn(step.added, part.x, step.kept * sums.x),
          ptx::fma_rn(step.added, part.y, step.kept * sums.y),
          ptx::fma_rn(step.added, part.z, step.kept * sums.z),
          ptx::fma_rn(step.added, part.w, step.kept * sums.w)};
}

FOVEA_DEVICE ptx::F32x4 with_zeros_for_non_finite(const ptx::F32x4& x) {
  return {is_finite(x.x) ? x.x : 0.0F, is_finite(x.y) ? x.y : 0.0F, is_finite(x.z) ? x.z : 0.0F,
          is_finite(x.w) ? x.w : 0.0F};
}

FOVEA_DEVICE ptx::F32x4 times(const ptx::F32x4& sums, float factor) {
  return {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
}

/// Of a row at its end. Beside a large sink too, infinity stays.
FOVEA_DEVICE float finished(float sum, float factor) {
  return factor == 0.0F && !is_finite(sum) ? sum : sum * factor;
}

/// row_max of a row at its end; `greatest`: of its splits, or NaN.
FOVEA_DEVICE float finished_max(float greatest, float sum) {
  return is_nan(greatest) ? greatest : finish_row_max(greatest, sum, 1.0F);
}

/// The same bits where all is finite; of what weighs nothing, infinity and NaN stay, but for a split that saw no key.
FOVEA_DEVICE ptx::F32x4 fold(const ptx::F32x4& sums, const FoldStep& step, const ptx::F32x4& part) {
  ptx::F32x4 all = fold_finite(step.kept == 0 ? with_zeros_for_non_finite(sums) : sums, step,
                               step.added == 0 ? with_zeros_for_non_finite(part) : part);
  if (step.kept == 0) all = with_non_finite(all, sums);
  if (step.added == 0 && step.is_seen) all = with_non_finite(all, part);
  return all;
}

}  // namespace fovea::cuda
