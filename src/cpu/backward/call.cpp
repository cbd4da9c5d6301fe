#include "cpu/backward/call.hpp"

#include <cstring>

namespace fovea::cpu {
namespace {

constexpr float kSmallestScale =
    1e-30F;  // below, scores are scaled before the mask: -inf · 0 is NaN

}  // namespace

BackwardCall::BackwardCall(const GradientProblem& problem_of, const BackwardPlan& plan_of,
                           const AttentionBackward& args_of, const BackwardMemory& memory_of)
    : problem(problem_of),
      f(problem_of.forward),
      plan(plan_of),
      spec(plan_of.spec),
      schedule(plan_of.schedule),
      args(args_of),
      forward(args_of.forward),
      memory(memory_of),
      kernels(*gradient_panel_kernels(plan_of.spec.target)),
      gradient(*gradient_kernels(plan_of.spec.target)),
      q(forward.q),
      k(forward.k),
      v(forward.v),
      out(forward.out),
      dout(args.dout),
      score_bindings(plan.score.bindings(forward.score)),
      mask_bindings(plan.mask.bindings(forward.mask)),
      derivative_bindings(plan.derivative.bindings(forward.score)),
      dropout(panel_dropout(forward)),
      is_prescaled(!plan.score.empty() || f.softmax_scale < kSmallestScale),
      wants_score_gradients(problem.wants_dq() || problem.wants_dk() || !problem.captured.empty()) {
  if (reads_captures(forward.mask)) own_mapper_.emplace(plan.mapper->over(forward.mask));
}

std::int64_t BackwardCall::row_id(const Sequence& s, const RowOfHead& row) const {
  if (f.is_varlen) return row.q_head * f.total_q + s.q_begin + row.q_idx;
  return (s.index * f.num_heads_q + row.q_head) * s.seqlen_q + row.q_idx;
}

double BackwardCall::sink_of(std::int64_t q_head) const {
  return static_cast<const float*>(forward.sinks.data())[q_head * forward.sinks.stride(0)];
}

TileSource BackwardCall::tile_of(const Rows& rows, const Sequence& s, std::int64_t kv_head,
                                 std::int64_t begin, std::int64_t end,
                                 std::int64_t head_dim) const {
  return {.data = rows.at(s.batch_offset, s.kv_begin + begin, kv_head),
          .dtype = rows.dtype,
          .row_stride = rows.row_stride,
          .col_stride = rows.col_stride,
          .num_rows = end - begin,
          .num_cols = head_dim};
}

KeyTile BackwardCall::load_rows(const TileSource& source, std::byte* buffer) const {
  const bool lie_apart = kernels.product == Dtype::f32 && source.dtype == Dtype::f32 &&
                         source.col_stride == 1 && source.row_stride != source.num_cols;
  if (!lie_apart) return kernels.load_keys(source, buffer);
  const auto row_bytes = static_cast<std::size_t>(source.num_cols) * sizeof(float);
  for (std::int64_t row = 0; row < source.num_rows; ++row) {
    std::memcpy(buffer + static_cast<std::size_t>(row) * row_bytes,
                source.data + row * source.row_stride * static_cast<std::int64_t>(sizeof(float)),
                row_bytes);
  }
  return {buffer, source.num_cols, source.num_rows};
}

}  // namespace fovea::cpu
