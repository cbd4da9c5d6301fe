#include "cpu/forward/tile_walk.hpp"

#include <algorithm>
#include <numbers>

#include "cpu/forward/non_finite.hpp"
#include "cpu/kernels/kernel_scope.hpp"

namespace fovea::cpu {
namespace {

/// As kernels of panels want a tile: numbers at one stride.
TileSource as_numbers(const TileSource& source, const PanelKernels& kernels, std::byte* buffer) {
  if (source.scales != nullptr) return kernels.numbers(source, reinterpret_cast<float*>(buffer));
  return source.rows == nullptr ? source : gathered(source, buffer);
}

}  // namespace

TileWalk::TileWalk(const ForwardCall& call, const ForwardItem& item, const ForwardScratch& scratch)
    : call_(call), item_(item), scratch_(scratch), panels_(panels_of(call, item, scratch)) {}

void TileWalk::run(const std::function<void(const RowPanel&)>& done) {
  const PanelKernels& kernels = call_.kernels;
  const KernelScope scope(kernels);
  PanelPipeline overlapped = pipeline();
  NextTile next;
  const auto finish = [&](RowPanel& panel) {
    start_if_new(panel, kernels);
    panel.is_done = true;
    done(panel);
  };
  for (std::int64_t tile = first_tile(); tile < item_.tile_end; ++tile) {
    if (!enter(tile)) continue;
    const KeyTile keys = load_tile(kernels, /*is_careful=*/false);
    next = next_fetches();
    for (RowPanel& panel : panels_) {
      if (panel.part.range.count == 0) continue;
      start_if_new(panel, kernels);
      if (has_pipeline()) {
        kernels.push(overlapped, turn_of(panel, keys), next);
      } else {
        multiply(panel, keys, next);
      }
    }
    if (has_pipeline()) kernels.flush(overlapped, next);
    for (RowPanel& panel : panels_) {
      if (panel.is_started && !panel.is_done && panel.ends_before(kv_end_)) finish(panel);
    }
  }
  for (RowPanel& panel : panels_) {
    if (!panel.is_done) finish(panel);
  }
}

const RowPanel& TileWalk::run_carefully(const PanelKernels& kernels) {
  const KernelScope scope(kernels);
  const std::size_t out_floats =
      call_.kernels.output_bytes(call_.problem.head_dim_v) / sizeof(float);
  RowPanel& panel = panels_.front();
  std::fill_n(scratch_.extra, out_floats, 0.0F);
  pack_queries(panel, call_, kernels, scratch_);
  start(panel, call_);
  NextTile next;
  for (std::int64_t tile = first_tile(); tile < item_.tile_end; ++tile) {
    if (!enter(tile)) continue;
    const KeyTile keys = load_tile(kernels, /*is_careful=*/true);
    next = next_fetches();
    multiply_carefully(panel, keys, kernels, next);
  }
  for (std::size_t i = 0; i < out_floats; ++i) panel.out[i] += scratch_.extra[i];
  return panel;
}

// ---- tiles ----

void TileWalk::start_if_new(RowPanel& panel, const PanelKernels& kernels) {
  if (panel.is_started) return;
  pack_queries(panel, call_, kernels, scratch_);
  start(panel, call_);
}

/// Does some panel see some of this tile?
bool TileWalk::enter(std::int64_t tile) {
  tile_ = tile;
  kv_begin_ = tile * call_.spec.tile_kv;
  kv_end_ = std::min(kv_begin_ + call_.spec.tile_kv, item_.sequence.seqlen_kv);
  num_seeing_ = 0;
  for (RowPanel& panel : panels_) {
    panel.part = panel.keys.next(kv_begin_, kv_end_);
    num_seeing_ += static_cast<std::int64_t>(panel.part.range.count > 0);
  }
  return num_seeing_ > 0;
}

std::int64_t TileWalk::first_tile() const {
  std::int64_t first = item_.tile_end;
  for (const RowPanel& panel : panels_) {
    if (panel.reach.count > 0) first = std::min(first, panel.reach.begin / call_.spec.tile_kv);
  }
  return std::max(first, item_.tile_begin);
}

KeyTile TileWalk::load_tile(const PanelKernels& kernels, bool is_careful) const {
  const CacheScratch& cached = scratch_.cached;
  const TileSource keys = call_.key_tile(item_.sequence, item_.kv_head, tile_, cached.key_rows);
  const TileSource values =
      call_.value_tile(item_.sequence, item_.kv_head, tile_, cached.value_rows);
  const KeyTile loaded =
      kernels.load_keys(as_numbers(keys, call_.plain_kernels, cached.keys), scratch_.keys);
  kernels.load_values(as_numbers(values, call_.plain_kernels, cached.values), is_careful,
                      scratch_.values);
  return loaded;
}

// ---- one panel's tile ----

void TileWalk::multiply(RowPanel& panel, const KeyTile& keys, NextTile& next) const {
  const TileStep step = scores_of(panel, keys, call_.kernels, next);
  apply_programs(step, call_, scratch_);
  add_values(step, call_.kernels, next);
}

void TileWalk::multiply_carefully(RowPanel& panel, const KeyTile& keys, const PanelKernels& kernels,
                                  NextTile& next) const {
  const TileStep step = scores_of(panel, keys, kernels, next);
  apply_programs(step, call_, scratch_);
  const TileSource values =
      call_.value_tile(item_.sequence, item_.kv_head, tile_, scratch_.cached.value_rows);
  collect_non_finite(step, values, call_, scratch_);
  add_values(step, kernels, next);
}

TileStep TileWalk::scores_of(const RowPanel& panel, const KeyTile& keys,
                             const PanelKernels& kernels, NextTile& next) const {
  kernels.scores(panel.queries, keys, panel.part.range, call_.problem.head_dim_qk,
                 panel.num_vectors, scratch_.scores, next);
  return {&panel, tile_, keys.num_keys, panel.part, scratch_.scores};
}

/// Scores become probabilities, and these weigh the values.
void TileWalk::add_values(const TileStep& step, const PanelKernels& kernels, NextTile& next) const {
  const RowPanel& panel = *step.panel;
  kernels.softmax(step.scores, step.seen.range.count, panel.num_vectors,
                  call_.unit * std::numbers::log2e_v<float>, panel.state, dropout_of(step, call_));
  kernels.accumulate(scratch_.values, step.num_keys, step.seen.range, step.scores,
                     call_.problem.head_dim_v, panel.num_vectors, panel.state.rescale, panel.out,
                     next);
}

// ---- what is fetched meanwhile ----

/// While panels work on a tile: queries of those that start in it or in the next one, out of those that end in it, the
/// next tile.
NextTile TileWalk::next_fetches() {
  const std::int64_t end = kv_begin_ + call_.spec.tile_kv;
  const std::size_t num_due = find_due_rows();
  TileSource keys, values;
  const bool goes_on =
      std::ranges::any_of(panels_, [&](const RowPanel& panel) { return !panel.ends_before(end); });
  if (goes_on && tile_ + 1 < item_.tile_end) {
    const CacheScratch& cached = scratch_.cached;
    keys = call_.key_tile(item_.sequence, item_.kv_head, tile_ + 1, cached.next_key_rows);
    values = call_.value_tile(item_.sequence, item_.kv_head, tile_ + 1, cached.next_value_rows);
  }
  const std::int64_t blocks = call_.spec.tile_kv / call_.kernels.key_block +
                              ceil_div(call_.problem.head_dim_v, call_.kernels.value_block);
  return {keys, values, num_seeing_ * blocks, std::span(due_rows_).first(num_due)};
}

std::size_t TileWalk::find_due_rows() {
  const std::int64_t end = kv_begin_ + call_.spec.tile_kv;
  std::size_t count = 0;
  bool is_first = true;
  for (const RowPanel& panel : panels_) {
    const bool starts_soon =
        !panel.is_started && panel.reach.count > 0 && panel.reach.begin < end + call_.spec.tile_kv;
    if (starts_soon && !is_first)
      due_rows_[count++] = rows_of(call_.q, panel, call_.problem.head_dim_qk);
    is_first = false;
  }
  for (const RowPanel& panel : panels_) {
    if (!panel.is_done && panel.part.range.count > 0 && panel.ends_before(end))
      due_rows_[count++] = rows_of(call_.out, panel, call_.problem.head_dim_v);
  }
  return count;
}

/// Rows of a panel, where they lie at one stride.
TileSource TileWalk::rows_of(const Rows& tensor, const RowPanel& panel,
                             std::int64_t head_dim) const {
  const std::int64_t last = panel.rows.num_rows() - 1;
  if (panel.q_head[0] != panel.q_head[last] || tensor.col_stride != 1) return {};
  const Sequence& s = panel.rows.sequence;
  return {.data = tensor.at(s.batch_offset, s.q_begin + panel.q_idx[0], panel.q_head[0]),
          .dtype = tensor.dtype,
          .row_stride = tensor.row_stride,
          .num_rows = panel.rows.num_rows(),
          .num_cols = head_dim};
}

// ---- panels overlapped, where the kernels can ----

/// Dropout comes between the sum and the product, where the pipeline has no place for it.
bool TileWalk::has_pipeline() const {
  return call_.kernels.push != nullptr && call_.dropout.threshold == 0;
}

PanelPipeline TileWalk::pipeline() const {
  return {.memory = scratch_.pipeline,
          .tile_kv = call_.spec.tile_kv,
          .head_dim_qk = call_.problem.head_dim_qk,
          .head_dim_v = call_.problem.head_dim_v,
          .scale_log2 = call_.unit * std::numbers::log2e_v<float>};
}

PanelTurn TileWalk::turn_of(const RowPanel& panel, const KeyTile& keys) const {
  const VisiblePart& visible = panel.part;
  std::uint32_t prepared = call_.is_prescaled ? ~0U : 0;
  for (int i = 0; i < visible.num_partial; ++i) {
    const KeyRange part = visible.partial[static_cast<std::size_t>(i)];
    for (std::int64_t at = part.begin; at < part.begin + part.count; at += kSubTileKeys)
      prepared |= 1U << (at - visible.range.begin) / kSubTileKeys;
  }
  return {.queries = panel.queries,
          .keys = keys,
          .values = scratch_.values,
          .range = visible.range,
          .out = panel.out,
          .state = panel.state,
          .prepare = &TileWalk::prepare_part,
          .prepared = prepared,
          .walk = this,
          .panel = &panel};
}

void TileWalk::prepare_part(const PanelTurn& turn, KeyRange part, float* scores) {
  const TileWalk& walk = *static_cast<const TileWalk*>(turn.walk);
  const RowPanel& panel = *static_cast<const RowPanel*>(turn.panel);
  const VisiblePart& visible = panel.part;
  TileStep step{&panel, walk.tile_, turn.keys.num_keys, {.range = part}, scores};
  for (int i = 0; i < visible.num_partial; ++i) {
    const KeyRange whole = visible.partial[static_cast<std::size_t>(i)];
    const std::int64_t begin = std::max(whole.begin, part.begin);
    const std::int64_t end = std::min(whole.begin + whole.count, part.begin + part.count);
    if (begin < end)
      step.seen.partial[static_cast<std::size_t>(step.seen.num_partial++)] = {begin, end - begin};
  }
  apply_programs(step, walk.call_, walk.scratch_);
}

}  // namespace fovea::cpu
