#include "cpu/backward/row_panel.hpp"

#include <algorithm>
#include <limits>

namespace fovea::cpu {

GradientPanel start_panel(const BackwardCall& call, const RowRange& rows,
                          const BackwardScratch::Panel& memory, const BackwardScratch& scratch) {
  const std::int64_t count = rows.count();
  for (std::int64_t lane = 0; lane < call.spec.lanes; ++lane) {
    // Padding lanes repeat the last row, so that programs read what exists.
    const RowOfHead row = call.row_at(rows, rows.begin + std::min(lane, count - 1));
    memory.q_idx[lane] = static_cast<std::int32_t>(row.q_idx);
    memory.q_head[lane] = static_cast<std::int32_t>(row.q_head);
    scratch.rows[lane] = lane < count ? call.row_of(call.q, rows.sequence, row) : nullptr;
  }
  GradientPanel panel{.memory = &memory,
                      .rows = rows,
                      .num_vectors = static_cast<int>(ceil_div(count, call.kernels.vector_lanes))};
  call.kernels.pack_queries(scratch.rows, call.q.dtype, call.q.col_stride, call.f.head_dim_qk,
                            memory.queries);
  call.mapper().row(tile_row(rows.sequence, rows.kv_head, memory.q_idx, memory.q_head, count),
                    panel.keys.runs);
  return panel;
}

void load_douts(const GradientPanel& panel, const BackwardCall& call) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const BackwardScratch::Panel& memory = *panel.memory;
  const Sequence& s = panel.rows.sequence;
  for (std::int64_t lane = 0; lane < call.spec.lanes; ++lane) {
    const bool is_row = lane < panel.num_rows();
    const std::int64_t id = call.row_id(s, panel.row(lane));
    memory.origin[lane] = is_row ? call.memory.origin[id] : 0;
    memory.log_sum[lane] = is_row ? call.memory.log_sum[id] : -kInfinity;
    memory.delta[lane] = is_row ? call.memory.delta[id] : 0;
    memory.dout_source[lane] = is_row ? call.row_of(call.dout, s, panel.row(lane)) : nullptr;
  }
  call.kernels.pack_queries(memory.dout_source, call.dout.dtype, call.dout.col_stride,
                            call.f.head_dim_v, memory.douts);
}

}  // namespace fovea::cpu
