#include "cpu/forward/results.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/row_state.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

/// What a row's sums are multiplied by, and its lse; 0 and -inf where it sees nothing.
struct ForwardResults::Denominator {
  float factor = 0;
  double lse = -kInfinity;
};

/// Relative to the larger of row maximum and sink, which joins the denominator here. A row that sees nothing has sums
/// of 0.
ForwardResults::Denominator ForwardResults::denominator(double row_max, double row_sum,
                                                        std::int64_t q_head) const {
  const AttentionForward& args = call_.args;
  const bool is_empty = row_max == -kInfinity;
  if (!args.sinks) {
    if (is_empty) return {};
    return {static_cast<float>(1 / row_sum), args.lse ? row_max + std::log(row_sum) : 0};
  }
  const double sink = static_cast<const float*>(args.sinks.data())[q_head * args.sinks.stride(0)];
  const double top = largest_of(row_max, sink);
  if (top == -kInfinity) return {};
  const double own = is_empty ? 0 : std::exp(row_max - top);
  const double total = (is_empty ? 0 : row_sum * own) + sink_share(sink, top);
  if (is_empty) return {0, top + std::log(total)};
  return {static_cast<float>(own / total), top + std::log(total)};
}

void ForwardResults::finish_row(const ForwardItem& rows, std::int64_t lane, float* state) const {
  const std::int64_t width = call_.problem.head_dim_v;
  const std::int64_t index = rows.row_begin + lane;
  const std::int64_t q_idx = index % rows.sequence.seqlen_q;
  const std::int64_t q_head = rows.kv_head * call_.problem.group + index / rows.sequence.seqlen_q;
  Denominator d = denominator(state[width], state[width + 1], q_head);
  if (d.factor == 0) {  // beside a far larger sink
    std::transform(state, state + width, state, [](float sum) { return weighed(0, sum); });
    d.factor = 1;
  }
  write_out(rows.sequence, q_idx, q_head, state, d.factor);
  write_row_value(call_.args.lse, rows.sequence, q_idx, q_head, d.lse);
  write_row_value(call_.args.row_max, rows.sequence, q_idx, q_head, state[width]);
}

void ForwardResults::write_out(const Sequence& s, std::int64_t q_idx, std::int64_t q_head,
                               const float* row, float factor) const {
  const Rows& out = call_.out;
  call_.kernels.store_row(row, factor, call_.problem.head_dim_v, out.dtype, out.col_stride,
                          out.at(s.batch_offset, s.q_begin + q_idx, q_head));
}

void ForwardResults::write_row_value(const TensorView& view, const Sequence& s, std::int64_t q_idx,
                                     std::int64_t q_head, double value) const {
  if (!view) return;
  static_cast<float*>(view.mutable_data())[row_value_offset(view, s, q_idx, q_head)] =
      static_cast<float>(value);
}

void ForwardResults::clear_padding_rows() const {
  const ForwardProblem& problem = call_.problem;
  if (!problem.is_varlen) return;
  const std::vector<float> zeros(static_cast<std::size_t>(problem.head_dim_v), 0.0F);
  const std::int64_t end = cu_seqlen(call_.args.cu_seqlens_q, problem.num_sequences);
  for (std::int64_t row = end; row < problem.total_q; ++row) {
    const Sequence nobody{.q_begin = row};
    for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
      write_out(nobody, 0, head, zeros.data(), 1.0F);
      write_row_value(call_.args.lse, nobody, 0, head, -kInfinity);
      write_row_value(call_.args.row_max, nobody, 0, head, -kInfinity);
    }
  }
}

}  // namespace fovea::cpu
