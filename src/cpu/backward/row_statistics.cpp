#include "cpu/backward/row_statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/backward/tile_scores.hpp"
#include "cpu/kernels/kernel_scope.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Above this, rounding lse to fp32 moves P by more than 4e-6 of itself: such rows are summed again. A bias of the
// lowest float on all keys of a row is common.
constexpr float kLargeLse = 64;

bool is_large(float lse) { return std::isfinite(lse) && std::abs(lse) > kLargeLse; }

/// Is lse that of the keys of this call, up to rounding? With parts of the keys, as ranks have them, callers give the
/// lse of all: it is kept as it is then.
bool is_lse_of(double sum_of_keys, float lse) {
  constexpr double kRounding = 0x1p-20;
  return !(std::abs(sum_of_keys - lse) > kRounding * std::abs(lse));  // infinities are equal
}

/// dO · O
double product_of(const BackwardCall& call, const Sequence& s, const RowOfHead& row) {
  return call.gradient.product(
      {call.row_of(call.out, s, row), call.out.dtype, call.out.col_stride},
      {call.row_of(call.dout, s, row), call.dout.dtype, call.dout.col_stride}, call.f.head_dim_v);
}

/// The online softmax of all keys of a panel, in the units of its scores.
void sum_scores(GradientPanel& panel, const PanelState& state, const BackwardCall& call,
                const BackwardScratch& scratch) {
  const auto lanes = static_cast<std::size_t>(call.spec.lanes);
  const Sequence& s = panel.rows.sequence;
  const float unit = call.is_prescaled ? 1.0F : call.f.softmax_scale;
  std::fill_n(state.row_max, lanes, -kInfinity);
  std::fill_n(state.row_sum, lanes, 0.0F);
  for (std::int64_t begin = 0; begin < s.seqlen_kv; begin += call.spec.tile_kv) {
    const std::int64_t end = std::min(begin + call.spec.tile_kv, s.seqlen_kv);
    const GradientTile tile{panel, begin, panel.keys.next(begin, end)};
    if (tile.num_keys() == 0) continue;
    const KeyTile keys = call.kernels.load_keys(
        call.tile_of(call.k, s, panel.rows.kv_head, begin, end, call.f.head_dim_qk),
        scratch.key_buffer);
    compute_scores(tile, keys, call, scratch);
    call.kernels.softmax(scratch.scores, tile.num_keys(), panel.num_vectors,
                         unit * std::numbers::log2e_v<float>, state, {});
  }
}

/// Row maximum and sum of a panel, as the forward pass has them before they become one number. They also tell a row
/// that sees nothing but its sink: what its out and dO hold is of no effect.
void sum_again(const RowRange& rows, const BackwardCall& call, const BackwardScratch& scratch) {
  const KernelScope scope(call.kernels);
  const BackwardScratch::Panel& memory = scratch.panels.front();
  GradientPanel panel = start_panel(call, rows, memory, scratch);
  // Lanes that the panel will not need again before start_panel fills them.
  const PanelState state{memory.origin, memory.log_sum, memory.delta};
  sum_scores(panel, state, call, scratch);
  const float unit = call.is_prescaled ? 1.0F : call.f.softmax_scale;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const RowOfHead row = call.row_at(rows, i);
    const std::int64_t id = call.row_id(rows.sequence, row);
    const auto lane = static_cast<std::size_t>(i - rows.begin);
    const float lse = call.memory.log_sum[id];
    const double sink =
        call.forward.sinks ? call.sink_of(row.q_head) : -std::numeric_limits<double>::infinity();
    if (state.row_max[lane] == -kInfinity && state.row_sum[lane] == 0) {
      if (is_lse_of(sink, lse))
        call.memory.delta[id] = static_cast<float>(-call.dlse_of(rows.sequence, row));
      continue;
    }
    if (!is_large(lse) || !std::isfinite(state.row_max[lane])) continue;
    const double greatest = static_cast<double>(state.row_max[lane]) * unit;
    const double log_sum = std::log(state.row_sum[lane] + std::exp(sink - greatest));
    if (!is_lse_of(greatest + log_sum, lse)) continue;
    call.memory.origin[id] = state.row_max[lane];
    call.memory.log_sum[id] = static_cast<float>(log_sum);
  }
}

void compute_panel_statistics(const RowRange& rows, const BackwardCall& call,
                              const BackwardScratch& scratch) {
  const BackwardMemory& memory = call.memory;
  bool is_again = false;
  for (std::int64_t i = rows.begin; i < rows.end; ++i) {
    const RowOfHead row = call.row_at(rows, i);
    const std::int64_t id = call.row_id(rows.sequence, row);
    const float lse = call.row_value(call.forward.lse, rows.sequence, row);
    const double product = call.plan.sums_delta ? 0 : product_of(call, rows.sequence, row);
    memory.origin[id] = 0;
    memory.log_sum[id] = lse;
    memory.delta[id] = static_cast<float>(product - call.dlse_of(rows.sequence, row));
    is_again |= is_large(lse) || (call.problem.wants_dsinks && !std::isfinite(product));
  }
  if (is_again) sum_again(rows, call, scratch);
}

}  // namespace

void compute_row_statistics(const RowRange& rows, const BackwardCall& call,
                            const BackwardScratch& scratch) {
  RowRange panel = rows;
  for (; panel.begin < rows.end; panel.begin = panel.end) {
    panel.end = std::min(rows.end, panel.begin + call.spec.lanes);
    compute_panel_statistics(panel, call, scratch);
  }
}

}  // namespace fovea::cpu
