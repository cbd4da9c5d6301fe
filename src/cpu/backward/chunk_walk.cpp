#include "cpu/backward/chunk_walk.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/backward/non_finite.hpp"
#include "cpu/kernels/kernel_scope.hpp"

namespace fovea::cpu {

void ChunkWalk::run() {
  if (item_.key_begin == item_.key_end) return;
  const KernelScope scope(call_.kernels);
  clear_sums();
  load_chunk();
  const std::int64_t num_rows = call_.num_rows(item_.sequence);
  const std::int64_t rows_at_once = call_.spec.panels * call_.spec.lanes;
  for (std::int64_t begin = 0; begin < num_rows; begin += rows_at_once) {
    const std::int64_t end = std::min(num_rows, begin + rows_at_once);
    walk_panels({item_.sequence, item_.kv_head, begin, end});
  }
  if (call_.problem.wants_dk()) write_keys(call_.args.dk, scratch_.dk, call_.f.head_dim_qk);
  if (call_.problem.wants_dv()) write_keys(call_.args.dv, scratch_.dv, call_.f.head_dim_v);
}

// ---- the chunk ----

void ChunkWalk::clear_sums() const {
  // As many keys as accumulate_rows may write.
  const std::int64_t keys = ceil_div(item_.key_end - item_.key_begin, kSubTileKeys) * kSubTileKeys;
  const auto clear = [&](float* sums, std::int64_t head_dim) {
    std::fill_n(sums, keys * call_.gradient.row_pitch(head_dim), 0.0F);
  };
  if (call_.problem.wants_dk()) clear(scratch_.dk, call_.f.head_dim_qk);
  if (call_.problem.wants_dv()) clear(scratch_.dv, call_.f.head_dim_v);
  std::fill_n(scratch_.ones, call_.spec.lanes, 1.0F);
  dq_sums_.clear_item(item_);
}

void ChunkWalk::load_chunk() const {
  const ForwardProblem& f = call_.f;
  const PanelKernels& kernels = call_.kernels;
  const std::int64_t tile_kv = call_.spec.tile_kv;
  const std::size_t key_bytes = kernels.key_bytes(tile_kv, f.head_dim_qk);
  const std::size_t value_bytes = kernels.key_bytes(tile_kv, f.head_dim_v);
  const std::size_t column_bytes = kernels.value_bytes(tile_kv, f.head_dim_qk);
  std::size_t tile = 0;
  for (std::int64_t begin = item_.key_begin; begin < item_.key_end; begin += tile_kv, ++tile) {
    const std::int64_t end = std::min(begin + tile_kv, item_.key_end);
    const auto source = [&](const Rows& rows, std::int64_t head_dim) {
      return call_.tile_of(rows, item_.sequence, item_.kv_head, begin, end, head_dim);
    };
    const TileSource keys = source(call_.k, f.head_dim_qk);
    const TileSource values = source(call_.v, f.head_dim_v);
    scratch_.keys[tile] = call_.load_rows(keys, scratch_.key_buffer + tile * key_bytes);
    scratch_.values[tile] = call_.load_rows(values, scratch_.value_buffer + tile * value_bytes);
    if (call_.problem.wants_dq())
      kernels.load_values(keys, /*is_careful=*/true, scratch_.key_columns + tile * column_bytes);
  }
}

void ChunkWalk::write_keys(const TensorView& view, const float* sums, std::int64_t head_dim) const {
  const Rows to(view);
  const Sequence& s = item_.sequence;
  const std::int64_t pitch = call_.gradient.row_pitch(head_dim);
  for (std::int64_t key = item_.key_begin; key < item_.key_end; ++key) {
    call_.kernels.store_row(sums + (key - item_.key_begin) * pitch, 1.0F, head_dim, to.dtype,
                            to.col_stride, to.at(s.batch_offset, s.kv_begin + key, item_.kv_head));
  }
}

// ---- panels ----

void ChunkWalk::walk_panels(const RowRange& rows) {
  std::vector<GradientPanel> panels;
  panels.reserve(static_cast<std::size_t>(call_.spec.panels));
  for (RowRange part = rows; part.begin < rows.end; part.begin = part.end) {
    part.end = std::min(rows.end, part.begin + call_.spec.lanes);
    GradientPanel panel = start_panel(call_, part, scratch_.panels[panels.size()], scratch_);
    if (!is_seen_by(panel)) continue;
    load_gradients(panel);
    panels.push_back(std::move(panel));
  }
  std::size_t index = 0;
  const std::int64_t tile_kv = call_.spec.tile_kv;
  for (std::int64_t begin = item_.key_begin; begin < item_.key_end; begin += tile_kv, ++index) {
    const std::int64_t end = std::min(begin + tile_kv, item_.key_end);
    for (GradientPanel& panel : panels) {
      const GradientTile tile{panel, begin, panel.keys.next(begin, end)};
      if (tile.num_keys() > 0) step(tile, index);
    }
  }
  if (!call_.problem.wants_dq()) return;
  for (const GradientPanel& panel : panels) {
    call_.gradient.add_queries(panel.memory->dq, panel.num_rows(), call_.f.head_dim_qk,
                               panel.memory->dq_rows, dq_sums_.stride());
  }
}

bool ChunkWalk::is_seen_by(const GradientPanel& panel) const {
  return std::ranges::any_of(panel.keys.runs, [&](const mask::TileRun& run) {
    return run.begin * kSubTileKeys < item_.key_end && run.end * kSubTileKeys > item_.key_begin;
  });
}

/// Everything that gradients read of the rows, and where their dq goes.
void ChunkWalk::load_gradients(GradientPanel& panel) const {
  const ForwardProblem& f = call_.f;
  const BackwardScratch::Panel& memory = *panel.memory;
  const GradientKernels& gradient = call_.gradient;
  gradient.pack_rows(scratch_.rows, panel.num_rows(), call_.q.dtype, call_.q.col_stride,
                     f.head_dim_qk, memory.query_rows);
  load_douts(panel, call_);
  panel.is_dout_finite = gradient.pack_rows(memory.dout_source, panel.num_rows(), call_.dout.dtype,
                                            call_.dout.col_stride, f.head_dim_v, memory.dout_rows);
  if (!call_.problem.wants_dq()) return;
  for (std::int64_t lane = 0; lane < panel.num_rows(); ++lane)
    memory.dq_rows[lane] = dq_sums_.row(panel.rows.sequence, panel.row(lane), item_.chunk);
  std::fill_n(memory.dq, call_.kernels.output_bytes(f.head_dim_qk) / sizeof(float), 0.0F);
}

// ---- one panel's tile ----

/// Sums of the first key that the panel sees of the tile.
float* ChunkWalk::key_sums(float* sums, const GradientTile& tile, std::int64_t head_dim) const {
  return sums + (tile.first_seen() - item_.key_begin) * call_.gradient.row_pitch(head_dim);
}

void ChunkWalk::step(const GradientTile& tile, std::size_t index) {
  const GradientPanel& panel = tile.panel;
  const bool wants_dv = call_.problem.wants_dv();
  compute_scores(tile, scratch_.keys[index], call_, scratch_);
  if (!panel.is_dout_finite) {
    const auto count = static_cast<std::size_t>(tile.num_keys() * call_.spec.lanes);
    std::memcpy(scratch_.seen, scratch_.scores, count * sizeof(float));
  }
  if (call_.wants_score_gradients)
    compute_dout_products(tile, scratch_.values[index], call_, scratch_);
  const SoftmaxGradient gradients = softmax_step(tile, call_, scratch_);
  call_.gradient.softmax_gradient(gradients);
  if (gradients.is_read_between) {
    if (wants_dv && !panel.is_dout_finite)
      add_non_finite(tile, call_, scratch_, key_sums(scratch_.dv, tile, call_.f.head_dim_v));
    if (call_.wants_score_gradients) through_program(tile, task_, captured_, call_, scratch_);
    if (call_.gradient.pack_gradients != nullptr) call_.gradient.pack_gradients(gradients);
  }
  add_products(tile, index);
}

/// dV += P dO;  dK += dS Q;  dQᵀ += Kᵀ dS
void ChunkWalk::add_products(const GradientTile& tile, std::size_t index) const {
  const ForwardProblem& f = call_.f;
  const GradientPanel& panel = tile.panel;
  const BackwardScratch::Panel& memory = *panel.memory;
  if (call_.problem.wants_dv()) {
    call_.gradient.accumulate_rows(scratch_.scores, tile.num_keys(), panel.num_rows(),
                                   memory.dout_rows, f.head_dim_v,
                                   key_sums(scratch_.dv, tile, f.head_dim_v));
  }
  if (call_.problem.wants_dk()) {
    call_.gradient.accumulate_rows(scratch_.products, tile.num_keys(), panel.num_rows(),
                                   memory.query_rows, f.head_dim_qk,
                                   key_sums(scratch_.dk, tile, f.head_dim_qk));
  }
  if (call_.problem.wants_dq()) {
    const std::size_t column_bytes = call_.kernels.value_bytes(call_.spec.tile_kv, f.head_dim_qk);
    NextTile next;
    call_.kernels.accumulate(scratch_.key_columns + index * column_bytes,
                             scratch_.keys[index].num_keys, tile.seen.range, scratch_.products,
                             f.head_dim_qk, panel.num_vectors, scratch_.ones, memory.dq, next);
  }
}

}  // namespace fovea::cpu
