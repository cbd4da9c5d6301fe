// Gradients of sinks: dsink of a head = - Σ exp(sink - lse) delta, over the rows of all sequences.
//
// One CTA for each head, its threads in turn, then a tree: one order of additions in every run.
#pragma once

#include "common/backward_work.cuh"
#include "common/online_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "shared/backward_params.h"
#include "shared/backward_spec.h"

namespace fovea::cuda {

/// The part of a row's weight that its sink has, times -delta.
FOVEA_DEVICE float sink_gradient(const BackwardParams& b, float sink, float lse, std::int64_t at) {
  if (lse == -infinity()) return 0;
  const float share = sink == lse ? 1.0F : ptx::ex2_approx_ftz((sink - lse) * kLog2E);
  return -share * ptx::ld_global(b.rows.delta + at);
}

/// Of the rows of a sequence that this thread takes.
template <bool is_varlen>
FOVEA_DEVICE double sum_of_sequence(const BackwardParams& b, const Sequence& s, std::int32_t head,
                                    float sink) {
  const ForwardParams& p = b.forward;
  const std::int64_t statistics = statistics_at<is_varlen>(b.rows, s, head);
  const float* const lse = p.lse + s.q_batch * p.lse_batch_stride + head * p.lse_head_stride +
                           s.q_row * p.lse_row_stride;
  double sum = 0;
#pragma unroll 1
  for (std::int32_t i = ptx::thread_idx().x; i < s.seqlen_q; i += kSinkThreads)
    sum += sink_gradient(b, sink, ptx::ld_global(lse + i * p.lse_row_stride), statistics + i);
  return sum;
}

template <bool is_varlen>
FOVEA_DEVICE void backward_sinks(const BackwardParams& b) {
  const ForwardParams& p = b.forward;
  const std::int32_t head = ptx::block_idx().x;
  const int thread = ptx::thread_idx().x;
  const float sink = ptx::ld_global(p.sinks + head * p.sinks_stride);
  double sum = 0;
#pragma unroll 1
  for (std::int32_t idx = 0; idx < p.num_sequences; ++idx) {
    Sequence s{idx, idx, 0, idx, 0, p.seqlen_q, p.seqlen_kv, false};
    if constexpr (is_varlen) {
      const PackedRows rows = packed_rows(p.cu_seqlens_q, idx, p.total_q);
      s = {idx, 0, rows.begin, 0, 0, rows.count, 0, false};
    }
    sum += sum_of_sequence<is_varlen>(b, s, head, sink);
  }
  const ptx::SharedAddress sums = ptx::dynamic_shared();
  ptx::st_shared(sums + thread * 8, sum);
#pragma unroll 1
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    ptx::sync_threads();
    if (thread < half) {
      sum += ptx::ld_shared<double>(sums + (thread + half) * 8);
      ptx::st_shared(sums + thread * 8, sum);
    }
  }
  if (thread == 0) ptx::st_global(b.dsinks + head * b.dsinks_stride, static_cast<float>(sum));
}

}  // namespace fovea::cuda
