// Sums of owned rows on their way out. Chapter 5 of sm80/attention_backward.cuh.
#pragma once

#include "common/element.cuh"
#include "common/float_constants.cuh"
#include "common/passes.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "sm80/backward/owner.cuh"

namespace fovea::cuda::sm80 {

/// What this thread has written before.
FOVEA_DEVICE float load_written(const void* data, Element element, std::int64_t at) {
  if (element == Element::f32) return ptx::ld_global(static_cast<const float*>(data) + at);
  const std::uint32_t bits = ptx::ld_global(static_cast<const std::uint16_t*>(data) + at);
  return element == Element::bf16 ? ptx::f32_of_bf16_lo(bits) : ptx::f32_of_f16_lo(bits);
}

/// Two neighbours of a row. By indicators: infinity, or NaN, is added to what an earlier pass has written.
FOVEA_DEVICE void store_pair(const GradientParam& to, std::int64_t at, int col, int head_dim,
                             float lo, float hi, Pass pass) {
  void* const data = const_cast<void*>(to.tensor.data);
  if (!is_indicator(pass) && to.is_aligned != 0 && to.element != Element::f32) {
    if (col >= head_dim) return;
    const std::uint32_t pair =
        to.element == Element::bf16 ? ptx::cvt_bf16x2(lo, hi) : ptx::cvt_f16x2(lo, hi);
    ptx::st_global(reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(data) + at + col),
                   pair);
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float value = e == 0 ? lo : hi;
    if (col + e >= head_dim) break;
    const std::int64_t element_at = at + (col + e) * to.tensor.col_stride;
    if (is_indicator(pass)) {
      if (value == 0) continue;
      const float before = load_written(data, to.element, element_at);
      value = before + (pass == Pass::positive ? infinity() : -infinity());
    }
    store_element(data, to.element, element_at, value);
  }
}

/// By a call, for tiles that are computed again, as hardly any is: in place, at every pair of a thread's sums, this was
/// most of what such a kernel took to compile, 1.5 s. Kernels that always store lose 1 to 5 % by calls.
FOVEA_DEVICE_CALL void call_store_pair(const GradientParam& to, std::int64_t at, int col,
                                       int head_dim, float lo, float hi, Pass pass) {
  store_pair(to, at, col, head_dim, lo, hi, pass);
}

template <Sm80BackwardSpec spec, int num_rows, int num_blocks>
FOVEA_DEVICE void store_sums(const Owner<spec>& owner, const GradientParam& to,
                             const float (&sums)[num_rows][num_blocks][4], float factor,
                             int head_dim, Pass pass) {
  constexpr auto kStore = spec.is_redo ? call_store_pair : store_pair;
  const Sequence& s = owner.owned.sequence;
  const BshdParam& t = to.tensor;
  const std::int64_t first = (spec.owns_keys ? s.kv_batch : s.q_batch) * t.batch_stride +
                             (spec.owns_keys ? s.kv_row : s.q_row) * t.row_stride +
                             owner.owned.head * t.head_stride;
#pragma unroll
  for (int i = 0; i < num_rows; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = owner.owned_row(i, half);
      if (row >= owner.owned_length()) continue;
      const std::int64_t at = first + row * t.row_stride;
#pragma unroll
      for (int j = 0; j < num_blocks; ++j) {
        kStore(to, at, owner.summed_column(j) + owner.lane % 4 * 2, head_dim,
               sums[i][j][half * 2] * factor, sums[i][j][half * 2 + 1] * factor, pass);
      }
    }
  }
}

}  // namespace fovea::cuda::sm80
