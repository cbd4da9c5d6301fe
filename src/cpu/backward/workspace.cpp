#include "cpu/backward/workspace.hpp"

#include <algorithm>

#include "cpu/operands.hpp"

namespace fovea::cpu {

bool sums_into_dq(const GradientProblem& problem, const BackwardSchedule& schedule) {
  return problem.dq.dtype == Dtype::f32 && !schedule.is_side_by_side;
}

BackwardMemory BackwardMemory::carve(Carver& carver, const GradientProblem& problem,
                                     const BackwardSchedule& schedule) {
  const ForwardProblem& f = problem.forward;
  const auto rows = static_cast<std::size_t>(f.total_q * f.num_heads_q);
  BackwardMemory m;
  m.first_block = carver.take<std::int64_t>(static_cast<std::size_t>(f.num_sequences) + 1);
  m.origin = carver.take<float>(rows);
  m.log_sum = carver.take<float>(rows);
  m.delta = carver.take<float>(rows);
  if (problem.wants_dq() && !sums_into_dq(problem, schedule)) {
    const auto copies =
        static_cast<std::size_t>(schedule.is_side_by_side ? schedule.max_chunks : 1);
    m.dq_sums = carver.take<float>(copies * rows * static_cast<std::size_t>(f.head_dim_qk));
  }
  return m;
}

BackwardScratch BackwardScratch::carve(Carver& carver, const GradientProblem& problem,
                                       const BackwardPlan& plan) {
  const ForwardProblem& f = problem.forward;
  const PanelKernels& kernels = *gradient_panel_kernels(plan.spec.target);
  const GradientKernels& gradient = *gradient_kernels(plan.spec.target);
  const auto lanes = static_cast<std::size_t>(plan.spec.lanes);
  const std::int64_t chunk = std::min(chunk_keys(plan.spec, f.seqlen_kv),
                                      ceil_div(f.seqlen_kv, plan.spec.tile_kv) * plan.spec.tile_kv);
  const auto keys = static_cast<std::size_t>(chunk);
  const auto tiles = static_cast<std::size_t>(ceil_div(chunk, plan.spec.tile_kv));
  const auto qk_pitch = static_cast<std::size_t>(gradient.row_pitch(f.head_dim_qk));
  const auto v_pitch = static_cast<std::size_t>(gradient.row_pitch(f.head_dim_v));
  const std::size_t tile_floats = kernels.score_bytes(plan.spec.tile_kv) / sizeof(float);
  BackwardScratch s;
  for (std::int64_t i = 0; i < plan.spec.panels; ++i) {
    Panel p;
    p.queries = carver.take<std::byte>(kernels.query_bytes(f.head_dim_qk));
    p.douts = carver.take<std::byte>(kernels.query_bytes(f.head_dim_v));
    p.query_rows = carver.take<std::byte>(gradient.row_bytes(f.head_dim_qk));
    p.dout_rows = carver.take<std::byte>(gradient.row_bytes(f.head_dim_v));
    p.dq = carver.take<float>(kernels.output_bytes(f.head_dim_qk) / sizeof(float));
    p.q_idx = carver.take<std::int32_t>(lanes);
    p.q_head = carver.take<std::int32_t>(lanes);
    p.origin = carver.take<float>(lanes);
    p.log_sum = carver.take<float>(lanes);
    p.delta = carver.take<float>(lanes);
    p.dq_rows = carver.take<float*>(lanes);
    p.dout_source = carver.take<const std::byte*>(lanes);
    s.panels.push_back(p);
  }
  s.rows = carver.take<const std::byte*>(lanes);
  s.ones = carver.take<float>(lanes);
  s.keys = carver.take<KeyTile>(tiles);
  s.values = carver.take<KeyTile>(tiles);
  s.key_buffer =
      carver.take<std::byte>(tiles * kernels.key_bytes(plan.spec.tile_kv, f.head_dim_qk));
  s.value_buffer =
      carver.take<std::byte>(tiles * kernels.key_bytes(plan.spec.tile_kv, f.head_dim_v));
  if (problem.wants_dq()) {
    s.key_columns =
        carver.take<std::byte>(tiles * kernels.value_bytes(plan.spec.tile_kv, f.head_dim_qk));
  }
  if (problem.wants_dk()) s.dk = carver.take<float>(keys * qk_pitch);
  if (problem.wants_dv()) s.dv = carver.take<float>(keys * v_pitch);
  s.scores = carver.take<float>(tile_floats);
  s.products = carver.take<float>(tile_floats);
  if (plan.reads_score) s.raw_scores = carver.take<float>(tile_floats);
  if (!plan.derivative.empty() || !plan.captured.empty())
    s.derivative = carver.take<float>(tile_floats);
  s.seen = carver.take<float>(tile_floats);
  if (!plan.captured.empty())
    s.offsets = carver.take<std::int64_t>(tile_floats + lanes +
                                          static_cast<std::size_t>(plan.spec.tile_kv));
  s.program = carver.take<std::byte>(plan.program_bytes);
  return s;
}

}  // namespace fovea::cpu
