#include "cpu/backward/summed_delta.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "cpu/backward/tile_scores.hpp"
#include "cpu/kernels/kernel_scope.hpp"

namespace fovea::cpu {
namespace {

constexpr std::size_t kMaxLanes = 64;  // of a panel on any target

struct RowSums {
  std::array<double, kMaxLanes> weights{};   // Σ P
  std::array<double, kMaxLanes> products{};  // Σ P dP
};

/// Sums over keys: fp32 of a few, fp64 of these.
void add_keys(const float* values, const GradientTile& tile, std::int64_t lanes,
              std::array<double, kMaxLanes>& sums) {
  constexpr std::int64_t kKeysAtOnce = 8;
  const std::int64_t num_rows = tile.panel.num_rows();
  for (std::int64_t begin = 0; begin < tile.num_keys(); begin += kKeysAtOnce) {
    std::array<float, kMaxLanes> part{};
    const std::int64_t end = std::min(begin + kKeysAtOnce, tile.num_keys());
    for (std::int64_t key = begin; key < end; ++key) {
      const float* row = values + key * lanes;
      for (std::int64_t lane = 0; lane < num_rows; ++lane)
        part[static_cast<std::size_t>(lane)] += row[lane];
    }
    for (std::size_t lane = 0; lane < static_cast<std::size_t>(num_rows); ++lane)
      sums[lane] += part[lane];
  }
}

/// P before dropout: softmax_gradient leaves it after.
void add_row_sums(const GradientTile& tile, const BackwardCall& call,
                  const BackwardScratch& scratch, RowSums& sums) {
  SoftmaxGradient step = softmax_step(tile, call, scratch);
  step.products = scratch.products;
  step.is_read_between = true;
  step.factor = 1;
  const std::int64_t lanes = call.spec.lanes;
  const std::int64_t count = tile.num_keys() * lanes;
  const bool drops = step.dropout.threshold > 0;
  if (drops) std::copy_n(scratch.scores, count, scratch.derivative);
  call.gradient.softmax_gradient(step);
  if (drops) {
    std::copy_n(scratch.derivative, count, scratch.scores);
    step.products = nullptr;
    step.dropout.threshold = 0;
    call.gradient.softmax_gradient(step);
  }
  add_keys(scratch.scores, tile, lanes, sums.weights);
  add_keys(scratch.products, tile, lanes, sums.products);
}

struct KeySpan {
  std::int64_t begin, end;
};

void sum_tile(const KeySpan& span, std::vector<GradientPanel>& panels, std::vector<RowSums>& sums,
              const BackwardCall& call, const BackwardScratch& scratch) {
  KeyTile keys, values;
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const GradientTile tile{panels[i], span.begin, panels[i].keys.next(span.begin, span.end)};
    if (tile.num_keys() == 0) continue;
    if (keys.data == nullptr) {
      const RowRange& rows = panels[i].rows;
      const auto source = [&](const Rows& of, std::int64_t head_dim) {
        return call.tile_of(of, rows.sequence, rows.kv_head, span.begin, span.end, head_dim);
      };
      keys = call.load_rows(source(call.k, call.f.head_dim_qk), scratch.key_buffer);
      values = call.load_rows(source(call.v, call.f.head_dim_v), scratch.value_buffer);
    }
    compute_scores(tile, keys, call, scratch);
    compute_dout_products(tile, values, call, scratch);
    add_row_sums(tile, call, scratch, sums[i]);
  }
}

/// Without a sink Σ P is 1: dividing by what it came to, rows of dS sum to -dlse whatever the error of lse.
void set_delta(const GradientPanel& panel, const RowSums& sums, const BackwardCall& call) {
  const Sequence& s = panel.rows.sequence;
  for (std::int64_t lane = 0; lane < panel.num_rows(); ++lane) {
    const RowOfHead row = panel.row(lane);
    const double weight = sums.weights[static_cast<std::size_t>(lane)];
    double delta = sums.products[static_cast<std::size_t>(lane)];
    if (!call.forward.sinks && weight != 0) delta /= weight;
    call.memory.delta[call.row_id(s, row)] = static_cast<float>(delta - call.dlse_of(s, row));
  }
}

/// Of a few panels together, so that K and V are converted once.
void sum_delta_of_panels(const RowRange& rows, const BackwardCall& call,
                         const BackwardScratch& scratch) {
  const KernelScope scope(call.kernels);
  std::vector<GradientPanel> panels;
  std::vector<RowSums> sums(static_cast<std::size_t>(call.spec.panels));
  for (RowRange part = rows; part.begin < rows.end; part.begin = part.end) {
    part.end = std::min(rows.end, part.begin + call.spec.lanes);
    panels.push_back(start_panel(call, part, scratch.panels[panels.size()], scratch));
    load_douts(panels.back(), call);
    std::fill_n(panels.back().memory->delta, call.spec.lanes, 0.0F);
  }
  const std::int64_t seqlen_kv = rows.sequence.seqlen_kv;
  for (std::int64_t begin = 0; begin < seqlen_kv; begin += call.spec.tile_kv) {
    const KeySpan span{begin, std::min(begin + call.spec.tile_kv, seqlen_kv)};
    sum_tile(span, panels, sums, call, scratch);
  }
  for (std::size_t i = 0; i < panels.size(); ++i) set_delta(panels[i], sums[i], call);
}

}  // namespace

void sum_delta(const RowRange& rows, const BackwardCall& call, const BackwardScratch& scratch) {
  RowRange part = rows;
  for (; part.begin < rows.end; part.begin = part.end) {
    part.end = std::min(rows.end, part.begin + call.spec.panels * call.spec.lanes);
    sum_delta_of_panels(part, call, scratch);
  }
}

}  // namespace fovea::cpu
