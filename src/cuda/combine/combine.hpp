// What joins the partial states of a split problem: its text and its two forms. Read device/common/combine.cuh for the
// kernel.
#pragma once

#include "cuda/device/shared/combine.h"
#include "cuda/device_traits.hpp"
#include "cuda/jit/cubin.hpp"
#include "cuda/kernel_set.hpp"

namespace fovea::cuda {

/// How the kernel is compiled and launched; the bits are the same.
struct CombineForm {
  KernelRole role;
  int splits_at_once, num_warps;  // of a CTA: a row each
  int ctas_per_sm;                // that registers are left for; nothing spills
};
/// Many splits of few rows, and many rows.
inline constexpr CombineForm kDeepCombine{KernelRole::deep_combine, 16, 1, 16};
inline constexpr CombineForm kWideCombine{KernelRole::wide_combine, 8, 4, 6};
/// Many rows whose states may be those of groups, few of each row: what counts is that many rows are there at once.
inline constexpr CombineForm kGroupsCombine{KernelRole::wide_combine, 4, 4, 9};

/// The form for many rows.
const CombineForm& wide_form(bool takes_groups);
/// Which form is faster; a plan has both.
const CombineForm& combine_form(std::int64_t num_rows, std::int32_t max_splits, bool takes_groups);

jit::KernelText combine_text(const CombineSpec& spec, const CombineForm& form,
                             const DeviceTraits& device);

KernelLaunch combine_launch(const CombineParams& params, const CombineForm& form, bool is_chained,
                            const DeviceTraits& device);

}  // namespace fovea::cuda
