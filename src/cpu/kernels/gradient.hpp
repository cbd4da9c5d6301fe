// The steps of the backward pass that the forward's panel (panel.hpp) lacks, as a table of functions per target.
//
// With Sᵀ and dPᵀ [keys][lanes] from the forward's `scores`, probabilities P and score gradients dS come in the same layout.
// Three products follow:
//   - dQᵀ += Kᵀ dS  is the forward's `accumulate` with K in the place of V;
//   - dV += P dO and dK += dS Q broadcast P and dS where they lie and read rows of dO and Q: `accumulate_rows`.
// So nothing is transposed but the queries of a panel, once per panel. Read cpu/attention_backward.cpp for the loop.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/dtype.hpp"
#include "fovea/problem.hpp"

#include "cpu/kernels/panel.hpp"

namespace fovea::cpu {

/// From scores and dP of one panel's tile to probabilities and score gradients, in place.
struct SoftmaxGradient {
  float* scores = nullptr;  // [keys][lanes] in: masked scores; out: probabilities, dropout applied
  float* products =
      nullptr;  // [keys][lanes] in: dP; out: P (dP - delta) · factor. Null: not wanted
  std::int64_t num_keys = 0;
  int num_vectors = 0;
  float scale = 1;   // of the scores
  float factor = 1;  // of the gradients
  // Per lane: P = exp((score - origin) · scale - log_sum). log_sum is -inf for a lane that sees nothing.
  const float* origin = nullptr;
  const float* log_sum = nullptr;
  const float* delta = nullptr;
  PanelDropout dropout{};
};

/// A row in the caller's memory.
struct GradientRow {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t col_stride = 1;

  const std::byte* at(std::int64_t col) const {
    return data + col * col_stride * static_cast<std::int64_t>(size_bytes(dtype));
  }
};

struct GradientKernels {
  /// Floats from one row of `pack_rows` and of sums to the next.
  std::int64_t (*row_pitch)(std::int64_t head_dim);

  /// Σ a · b in fp64.
  double (*product)(const GradientRow& a, const GradientRow& b, std::int64_t count);
  /// rows[i] as f32 at out + i · row_pitch, padded with zeros; elements that are not finite become 0. Were all finite?
  bool (*pack_rows)(const std::byte* const* rows, std::int64_t num_rows, Dtype dtype,
                    std::int64_t col_stride, std::int64_t head_dim, float* out);
  /// Hidden scores (-inf) give exactly 0, whatever products and lanes hold.
  void (*softmax_gradient)(const SoftmaxGradient& step);
  /// out[i] = gradients[i] · derivatives[i] · factor; 0 where the gradient is 0: a hidden score's derivative may be anything.
  void (*chain)(const float* gradients, const float* derivatives, std::int64_t count, float factor,
                float* out);
  /// sums[key][d] += Σ_row weights[key][row] · rows[row][d], both of row_pitch.
  void (*accumulate_rows)(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                          const float* rows, std::int64_t head_dim, float* sums);
  /// to[row][d · col_stride] += sums[d][row]: the columns of dQᵀ to rows.
  void (*add_columns)(const float* sums, std::int64_t num_rows, std::int64_t head_dim,
                      float* const* to, std::int64_t col_stride);
};

/// Null where this build has no such kernels, and for targets that multiply in bf16.
const GradientKernels* gradient_kernels(CpuTarget target);

}  // namespace fovea::cpu
