// The steps of the backward pass that a panel (panel.hpp) lacks, as a table of functions per target.
//
// With Sᵀ and dPᵀ [keys][lanes] from the panel's `scores`, probabilities P and score gradients dS come in the same
// layout. Three products follow:
//   - dQᵀ += Kᵀ dS  is the panel's `accumulate` with K in the place of V;
//   - dV += P dO and dK += dS Q read rows of dO and Q: `accumulate_rows`.
// In f32 P and dS stay where they lie, to be broadcast; nothing is transposed but the queries of a panel, once per
// panel. Kernels that multiply in bf16 leave P and dS rounded, in layouts of their own. Read cpu/attention_backward.cpp
// for the loop.
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
  // [keys][lanes] in: dP; out: P (dP - delta) · factor. Null: not wanted
  float* products = nullptr;
  // Somebody reads the results in fp32 before products do: they are left so, and pack_gradients follows.
  bool is_read_between = false;
  std::int64_t num_keys = 0;
  std::int64_t lanes = 0;
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
  /// Floats from one row of sums of dK or dV to the next.
  std::int64_t (*row_pitch)(std::int64_t head_dim);
  /// Bytes that pack_rows fills for a panel, a multiple of 64.
  std::size_t (*row_bytes)(std::int64_t head_dim);

  /// Σ a · b in fp64.
  double (*product)(const GradientRow& a, const GradientRow& b, std::int64_t count);
  /// Rows of Q or dO where accumulate_rows reads them; elements that are not finite become 0. Were all finite?
  bool (*pack_rows)(const std::byte* const* rows, std::int64_t num_rows, Dtype dtype,
                    std::int64_t col_stride, std::int64_t head_dim, void* out);
  /// Hidden scores (-inf) give exactly 0, whatever products and lanes hold.
  void (*softmax_gradient)(const SoftmaxGradient& step);
  /// Scores and products of a step that was read between, as products want them. Null: fp32 is what they want.
  void (*pack_gradients)(const SoftmaxGradient& step) = nullptr;
  /// out[i] = gradients[i] · derivatives[i] · factor; 0 where the gradient is 0: a hidden score's derivative may be
  /// anything.
  void (*chain)(const float* gradients, const float* derivatives, std::int64_t count, float factor,
                float* out);
  /// sums[key][d] += Σ_row weights[key][row] · rows[row][d]; keys up to a multiple of kSubTileKeys may be written.
  void (*accumulate_rows)(const float* weights, std::int64_t num_keys, std::int64_t num_rows,
                          const void* rows, std::int64_t head_dim, float* sums);
  /// to[row][i · col_stride] += columns[i][row], of [count][lanes].
  void (*add_columns)(const float* columns, std::int64_t num_rows, std::int64_t count,
                      float* const* to, std::int64_t col_stride);
  /// The same for dQᵀ as the panel's `accumulate` leaves it: its lanes may stand in an order of their own.
  void (*add_queries)(const float* columns, std::int64_t num_rows, std::int64_t count,
                      float* const* to, std::int64_t col_stride);
};

/// Null where this build has no such kernels.
const GradientKernels* gradient_kernels(CpuTarget target);

/// The panel that these steps work on: that of the forward pass, or one of their own.
const PanelKernels* gradient_panel_kernels(CpuTarget target);

const GradientKernels* gradient_kernels_avx512_bf16();
const PanelKernels* gradient_panel_kernels_avx512_bf16();

const GradientKernels* gradient_kernels_amx_bf16();
const PanelKernels* gradient_panel_kernels_amx_bf16();

}  // namespace fovea::cpu
