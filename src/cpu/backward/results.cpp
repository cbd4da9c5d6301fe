#include "cpu/backward/results.hpp"

#include <limits>
#include <vector>

#include "cpu/row_state.hpp"

namespace fovea::cpu {
namespace {

void clear_rows(const BackwardCall& call, const TensorView& view, std::int64_t begin,
                std::int64_t head_dim) {
  if (!view) return;
  const Rows rows(view);
  const std::vector<float> zeros(static_cast<std::size_t>(head_dim), 0.0F);
  for (std::int64_t row = begin; row < view.size(0); ++row) {
    for (std::int64_t head = 0; head < view.size(1); ++head) {
      call.kernels.store_row(zeros.data(), 1.0F, head_dim, rows.dtype, rows.col_stride,
                             rows.at(0, row, head));
    }
  }
}

}  // namespace

void write_dsink(const BackwardCall& call, std::int64_t q_head) {
  const double sink = call.sink_of(q_head);
  double sum = 0;
  for (std::int64_t i = 0; i < call.f.num_sequences; ++i) {
    const Sequence s = call.sequence(i);
    for (std::int64_t q_idx = 0; q_idx < s.seqlen_q; ++q_idx) {
      const RowOfHead row{q_idx, q_head};
      const double lse = call.row_value(call.forward.lse, s, row);
      if (lse == -std::numeric_limits<double>::infinity()) continue;
      sum -= sink_share(sink, lse) * call.memory.delta[call.row_id(s, row)];
    }
  }
  const TensorView& dsinks = call.args.dsinks;
  static_cast<float*>(dsinks.mutable_data())[q_head * dsinks.stride(0)] = static_cast<float>(sum);
}

void clear_padding_rows(const BackwardCall& call) {
  if (!call.f.is_varlen) return;
  const std::int64_t end_q = cu_seqlen(call.forward.cu_seqlens_q, call.f.num_sequences);
  const std::int64_t end_kv = cu_seqlen(call.forward.cu_seqlens_kv, call.f.num_sequences);
  clear_rows(call, call.args.dq, end_q, call.f.head_dim_qk);
  clear_rows(call, call.args.dk, end_kv, call.f.head_dim_qk);
  clear_rows(call, call.args.dv, end_kv, call.f.head_dim_v);
}

}  // namespace fovea::cpu
