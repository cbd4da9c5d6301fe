#include "cpu/forward/row_panel.hpp"

#include <algorithm>
#include <limits>

#include "cpu/row_state.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ForwardItem rows_of_panel(const ForwardCall& call, ForwardItem item, std::int64_t panel) {
  item.row_begin += panel * call.spec.lanes;
  item.row_end = std::min(item.row_end, item.row_begin + call.spec.lanes);
  return item;
}

SeenKeys seen_keys(const mask::BandEdges& edges, const std::int32_t* q_idx, std::size_t panel,
                   std::size_t lanes, const ForwardScratch& scratch) {
  std::int32_t* begin = scratch.seen_begin + panel * lanes;
  std::int32_t* end = scratch.seen_end + panel * lanes;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const mask::Span keys = edges.keys_of(q_idx[lane]);
    begin[lane] = static_cast<std::int32_t>(keys.begin);
    end[lane] = static_cast<std::int32_t>(keys.end);
  }
  return {begin, end};
}

RowPanel panel_of(const ForwardCall& call, const ForwardItem& rows, std::size_t index,
                  const ForwardScratch& scratch) {
  const Sequence& s = rows.sequence;
  const auto lanes = static_cast<std::size_t>(call.spec.lanes);
  const std::int64_t count = rows.num_rows();
  std::int32_t* q_idx = scratch.q_idx + index * lanes;
  std::int32_t* q_head = scratch.q_head + index * lanes;
  for (std::int64_t lane = 0; lane < call.spec.lanes; ++lane) {
    // Padding lanes repeat the last row, so that programs read what exists.
    const std::int64_t row = rows.row_begin + std::min(lane, count - 1);
    q_idx[lane] = static_cast<std::int32_t>(row % s.seqlen_q);
    q_head[lane] = static_cast<std::int32_t>(rows.kv_head * call.problem.group + row / s.seqlen_q);
  }
  RowPanel p{
      .rows = rows,
      .queries = scratch.queries + index * call.kernels.query_bytes(call.problem.head_dim_qk),
      .out = reinterpret_cast<float*>(scratch.out +
                                      index * call.kernels.output_bytes(call.problem.head_dim_v)),
      .state = {.row_max = scratch.row_max + index * lanes,
                .row_sum = scratch.row_sum + index * lanes,
                .rescale = scratch.rescale,
                .origin = scratch.origin + index * lanes},
      .q_idx = q_idx,
      .q_head = q_head,
      .num_vectors = static_cast<int>(ceil_div(count, call.kernels.vector_lanes)),
      .keys = {.unit = call.spec.map_keys}};
  const auto edges =
      call.mapper().row(tile_row(s, rows.kv_head, q_idx, q_head, count), p.keys.runs);
  if (edges) p.seen = seen_keys(*edges, q_idx, index, lanes, scratch);
  p.reach = p.keys.all(s.seqlen_kv);
  return p;
}

}  // namespace

std::vector<RowPanel> panels_of(const ForwardCall& call, const ForwardItem& item,
                                const ForwardScratch& scratch) {
  const std::int64_t count = ceil_div(item.num_rows(), call.spec.lanes);
  std::vector<RowPanel> panels;
  panels.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    panels.push_back(
        panel_of(call, rows_of_panel(call, item, i), static_cast<std::size_t>(i), scratch));
  }
  return panels;
}

void pack_queries(const RowPanel& panel, const ForwardCall& call, const PanelKernels& kernels,
                  const ForwardScratch& scratch) {
  const Sequence& s = panel.rows.sequence;
  for (std::int64_t lane = 0; lane < call.spec.lanes; ++lane) {
    scratch.rows[lane] =
        lane < panel.rows.num_rows()
            ? call.q.at(s.batch_offset, s.q_begin + panel.q_idx[lane], panel.q_head[lane])
            : nullptr;
  }
  kernels.pack_queries(scratch.rows, call.q.dtype, call.q.col_stride, call.problem.head_dim_qk,
                       panel.queries);
}

void start(RowPanel& panel, const ForwardCall& call) {
  const std::int64_t lanes = call.spec.lanes;
  std::fill_n(panel.state.row_max, lanes, -kInfinity);
  std::fill_n(panel.state.origin, lanes, -kInfinity);
  std::fill_n(panel.state.row_sum, lanes, 0.0F);
  std::fill_n(panel.out, call.kernels.output_bytes(call.problem.head_dim_v) / sizeof(float), 0.0F);
  panel.is_started = true;
}

void emit_states(const RowPanel& panel, LaneSet wanted, const ForwardCall& call,
                 const ForwardScratch& scratch, const EmitState& emit) {
  const std::int64_t width = call.problem.head_dim_v;
  const std::int64_t pitch = state_pitch(width);
  const std::int64_t num_rows = panel.rows.num_rows();
  const PanelState& state_of = panel.state;
  for (std::int64_t lane = 0; lane < num_rows; ++lane) {
    const std::int64_t place = lane % kRowsAtOnce;
    if (place == 0) {
      const LaneRange lanes{lane, std::min(kRowsAtOnce, num_rows - lane)};
      call.kernels.extract_rows(panel.out, lanes, width, scratch.states, pitch);
    }
    if ((wanted >> lane & 1U) == 0) continue;
    float* state = scratch.states + place * pitch;
    settle({state_of.row_max[lane], state_of.origin[lane], state_of.row_sum[lane]}, call.unit,
           width, state);
    emit(panel.rows, lane, state);
  }
}

}  // namespace fovea::cpu
