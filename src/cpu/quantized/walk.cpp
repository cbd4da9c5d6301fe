#include "cpu/quantized/walk.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "cpu/forward/non_finite.hpp"
#include "cpu/kernels/kernel_scope.hpp"
#include "cpu/plain_panel.hpp"
#include "problem/input_codes.hpp"

namespace fovea::cpu {
namespace {

/// Of a score that the softmax multiplies itself: below, sums of codes might leave fp32 where scores do not.
constexpr float kLeastOctaves = 1e-20F;

bool has_nan(const float* of_lanes, std::int64_t lanes) {
  bool is_any = false;
  for (std::int64_t lane = 0; lane < lanes; ++lane) is_any |= std::isnan(of_lanes[lane]);
  return is_any;
}

}  // namespace

bool QuantizedKernels::has_pipeline(const ForwardProblem& f) const {
  return products != nullptr && products->push != nullptr && bytes.qk && bytes.pv &&
         f.problem.quant.block_kv == CodeProducts::kPitch;
}

QuantizedScratch QuantizedScratch::carve(Carver& carver, const ForwardSpec& spec,
                                         const ForwardProblem& f, const QuantizedKernels& how,
                                         std::size_t program_bytes) {
  const PanelKernels& kernels = forward_kernels(spec);
  const auto lanes = static_cast<std::size_t>(spec.lanes);
  const auto panels = static_cast<std::size_t>(spec.panels);
  QuantizedScratch s;
  s.forward = {
      WorkerScratch::carve(carver, spec, kernels, f.head_dim_qk, f.head_dim_v, program_bytes)};
  if (how.bytes.qk) {
    s.code_queries =
        carver.take<std::byte>(panels * CodeProducts::query_bytes(f.head_dim_qk, spec.lanes));
  }
  for (float** of_panels : {&s.scale, &s.shift, &s.octaves, &s.common, &s.kept_sum})
    *of_panels = carver.take<float>(panels * lanes);
  s.tile_out = carver.take<float>(kernels.output_bytes(f.head_dim_v) / sizeof(float));
  for (float** of_lanes : {&s.zeros, &s.weight}) *of_lanes = carver.take<float>(lanes);
  if (how.has_pipeline(f)) s.pipeline = carver.take<std::byte>(how.products->pipeline_bytes());
  if (f.problem.quant.smooth_q != Smoothing::none) {
    s.mean_scores = carver.take<float>(kernels.score_bytes(spec.tile_kv) / sizeof(float));
    s.mean_keys = carver.take<std::byte>(kernels.key_bytes(spec.tile_kv, f.head_dim_qk));
    s.mean_queries = carver.take<std::byte>(panels * kernels.query_bytes(f.head_dim_qk));
  }
  return s;
}

QuantizedWalk::QuantizedWalk(const ForwardCall& call, const QuantizedKernels& how,
                             const QuantizedOperands& operands, const ForwardItem& item,
                             const QuantizedScratch& scratch)
    : call_(call),
      quant_(call.problem.problem.quant),
      how_(how),
      kernels_(call.kernels),
      operands_(operands),
      item_(item),
      scratch_(scratch),
      rows_(operand_rows(call.problem, item.sequence)),
      pipeline_{.memory = scratch.pipeline} {
  for (RowPanel& rows : panels_of(call, item, scratch.forward))
    panels_.push_back(panel_of(rows, panels_.size()));
}

QuantizedPanel QuantizedWalk::panel_of(const RowPanel& rows, std::size_t index) const {
  const std::size_t first = index * static_cast<std::size_t>(call_.spec.lanes);
  const std::int64_t head_dim = call_.problem.head_dim_qk;
  QuantizedPanel panel{.rows = rows,
                       .scale = scratch_.scale + first,
                       .shift = scratch_.shift + first,
                       .octaves = scratch_.octaves + first,
                       .common = scratch_.common + first,
                       .sums = {.row_max = rows.state.row_max,
                                .origin = rows.state.origin,
                                .row_sum = rows.state.row_sum,
                                .kept_sum = scratch_.kept_sum + first,
                                .rescale = rows.state.rescale,
                                .weight = scratch_.weight}};
  if (how_.bytes.qk) {
    panel.code_queries =
        scratch_.code_queries + index * CodeProducts::query_bytes(head_dim, call_.spec.lanes);
  }
  if (scratch_.mean_queries != nullptr)
    panel.mean_queries = scratch_.mean_queries + index * kernels_.query_bytes(head_dim);
  return panel;
}

std::size_t QuantizedWalk::query_row(const RowPanel& panel, std::int64_t lane) const {
  return operands_.q.at(panel.q_head[lane], rows_.q + panel.q_idx[lane]);
}

std::size_t QuantizedWalk::key_row(std::int64_t kv_idx) const {
  return operands_.k.at(item_.kv_head, rows_.kv + kv_idx);
}

std::size_t QuantizedWalk::tile_flag(std::int64_t tile) const {
  return static_cast<std::size_t>((rows_.tile + tile) * call_.problem.num_heads_kv + item_.kv_head);
}

void QuantizedWalk::clear_tile_out() const {
  std::fill_n(scratch_.tile_out, kernels_.output_bytes(call_.problem.head_dim_v) / sizeof(float),
              0.0F);
}

void QuantizedWalk::run(const ForwardResults& results) {
  const KernelScope scope(kernels_);
  if (rounds_pv() && !how_.bytes.pv) clear_tile_out();
  std::fill_n(scratch_.zeros, call_.spec.lanes, 0.0F);
  for (QuantizedPanel& panel : panels_) start(panel);
  const std::int64_t tiles = ceil_div(item_.sequence.seqlen_kv, call_.spec.tile_kv);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t begin = tile * call_.spec.tile_kv;
    const std::int64_t end = std::min(begin + call_.spec.tile_kv, item_.sequence.seqlen_kv);
    bool is_seen = false;
    for (QuantizedPanel& panel : panels_) {
      panel.rows.part = panel.rows.keys.next(begin, end);
      is_seen = is_seen || panel.rows.part.range.count > 0;
    }
    if (!is_seen) continue;
    load(tile, end - begin);
    for (QuantizedPanel& panel : panels_) {
      if (panel.rows.part.range.count == 0) continue;
      if (overlaps(panel, tile, end - begin)) {
        push(panel, tile);
      } else {
        flush();
        step(panel, tile, end - begin);
      }
    }
  }
  flush();
  for (QuantizedPanel& panel : panels_) finish(panel, results);
}

// ---- panels ----

void QuantizedWalk::start(QuantizedPanel& panel) const {
  cpu::start(panel.rows, call_);
  std::fill_n(panel.sums.kept_sum, call_.spec.lanes, 0.0F);
  std::fill_n(panel.octaves, call_.spec.lanes, call_.unit * std::numbers::log2e_v<float>);
  std::fill_n(panel.common, call_.spec.lanes, 0.0F);
  if (!rounds_qk()) {
    pack_queries(panel.rows, call_, kernels_, scratch_.forward);
    return;
  }
  find_scales(panel);
  pack_codes(panel);
  if (panel.mean_queries != nullptr) pack_means(panel);
}

void QuantizedWalk::find_scales(QuantizedPanel& panel) const {
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane) {
    const std::size_t row = query_row(panel.rows, lane);
    panel.scale[lane] = operands_.q.scale[row];
    panel.shift[lane] = operands_.q_shift[row];
    panel.has_plain_rows = panel.has_plain_rows || operands_.q.is_plain[row] != 0;
  }
  panel.is_unscaled = can_stay_unscaled(panel);
  if (!panel.is_unscaled) {
    const float of_score = call_.is_prescaled ? call_.problem.softmax_scale : 1.0F;
    for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane)
      panel.common[lane] = of_score * panel.shift[lane];
    return;
  }
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane)
    panel.octaves[lane] *= panel.scale[lane];
}

/// A program wants scores as they are, and so does the softmax of kernels that round no probabilities.
bool QuantizedWalk::can_stay_unscaled(const QuantizedPanel& panel) const {
  if (!how_.bytes.qk || !rounds_pv() || call_.is_prescaled || panel.mean_queries != nullptr)
    return false;
  return std::all_of(panel.scale, panel.scale + call_.spec.lanes,
                     [&](float scale) { return scale * panel.octaves[0] > kLeastOctaves; });
}

/// Codes as numbers of the kernels of panels, or as bytes.
void QuantizedWalk::pack_codes(const QuantizedPanel& panel) const {
  const std::byte** const rows = scratch_.forward.rows;
  const std::int64_t head_dim = call_.problem.head_dim_qk;
  const std::int64_t bytes_of_row = how_.bytes.qk ? CodeProducts::pitch_of(head_dim) : head_dim * 2;
  const auto* const codes = how_.bytes.qk ? reinterpret_cast<const std::byte*>(operands_.q.bytes)
                                          : reinterpret_cast<const std::byte*>(operands_.q.wide);
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane) {
    const std::size_t row = query_row(panel.rows, lane);
    rows[lane] = lane < panel.rows.rows.num_rows()
                     ? codes + row * static_cast<std::size_t>(bytes_of_row)
                     : nullptr;
  }
  if (how_.bytes.qk) {
    how_.products->pack_queries(reinterpret_cast<const std::uint8_t* const*>(rows), head_dim,
                                panel.code_queries);
  } else {
    kernels_.pack_queries(rows, Dtype::bf16, 1, head_dim, panel.rows.queries);
  }
}

void QuantizedWalk::pack_means(const QuantizedPanel& panel) const {
  const std::byte** const rows = scratch_.forward.rows;
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane) {
    const std::int64_t first = panel.rows.q_idx[lane] - panel.rows.q_idx[lane] % quant_.block_q;
    const std::size_t row = operands_.q.at(panel.rows.q_head[lane], rows_.q + first);
    const float* const mean =
        operands_.q_mean + row * static_cast<std::size_t>(call_.problem.head_dim_qk);
    rows[lane] =
        lane < panel.rows.rows.num_rows() ? reinterpret_cast<const std::byte*>(mean) : nullptr;
  }
  kernels_.pack_queries(rows, Dtype::f32, 1, call_.problem.head_dim_qk, panel.mean_queries);
}

// ---- one tile ----

/// What kernels of panels read of a tile; codes that are multiplied as bytes lie ready.
void QuantizedWalk::load(std::int64_t tile, std::int64_t count) {
  if (!how_.bytes.qk) keys_ = kernels_.load_keys(keys_of(tile, count), scratch_.forward.keys);
  if (!how_.bytes.pv) {
    const bool is_careful = !rounds_pv() && operands_.has_plain_values[tile_flag(tile)] != 0;
    kernels_.load_values(values_of(tile, count), is_careful, scratch_.forward.values);
  }
}

/// A turn of the pipeline is products, masks and codes, of a whole tile: nothing is dropped, put right or given to a
/// program.
bool QuantizedWalk::overlaps(const QuantizedPanel& panel, std::int64_t tile,
                             std::int64_t count) const {
  return scratch_.pipeline != nullptr && call_.dropout.threshold == 0 && panel.is_unscaled &&
         !panel.has_plain_rows && count == call_.spec.tile_kv &&
         operands_.has_plain_keys[tile_flag(tile)] == 0 &&
         operands_.has_plain_values[tile_flag(tile)] == 0;
}

void QuantizedWalk::push(const QuantizedPanel& panel, std::int64_t tile) {
  const KeyRange whole{0, call_.spec.tile_kv};
  const VisiblePart& part = panel.rows.part;
  CodeTurn turn{.queries = panel.code_queries,
                .keys = coded_keys(tile, whole),
                .values = coded_values(tile, whole),
                .octaves = panel.octaves,
                .rows = panel.sums,
                .out = panel.rows.out};
  if (part.num_partial > 0 || part.range.count < whole.count) {
    MaskedTurn& masked = masked_turns_[num_masked_++ % 2];
    masked = {this, {&panel.rows, tile, whole.count, part, nullptr}};
    turn.hide = &QuantizedWalk::hide;
    turn.context = &masked;
  }
  how_.products->push(pipeline_, turn);
}

void QuantizedWalk::hide(const void* masked_turn, float* scores) {
  const MaskedTurn& turn = *static_cast<const MaskedTurn*>(masked_turn);
  const QuantizedWalk& walk = *turn.walk;
  const std::int64_t lanes = walk.call_.spec.lanes;
  const KeyRange range = turn.step.seen.range;
  TileStep step = turn.step;
  step.scores = scores + range.begin * lanes;
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  std::fill(scores, step.scores, kNothing);
  std::fill(step.scores + range.count * lanes, scores + step.num_keys * lanes, kNothing);
  apply_programs(step, walk.call_, walk.scratch_.forward);
}

void QuantizedWalk::flush() {
  if (scratch_.pipeline != nullptr) how_.products->flush(pipeline_);
}

CodedKeys QuantizedWalk::coded_keys(std::int64_t tile, KeyRange range) const {
  const std::int64_t pitch = CodeProducts::pitch_of(call_.problem.head_dim_qk);
  const std::size_t first = key_row(tile * call_.spec.tile_kv + range.begin);
  return {.codes = operands_.k.bytes + first * static_cast<std::size_t>(pitch),
          .pitch = pitch,
          .scale = operands_.k.scale + first,
          .count = range.count};
}

CodedValues QuantizedWalk::coded_values(std::int64_t tile, KeyRange range) const {
  const std::int64_t head_dim = call_.problem.head_dim_v;
  return {.codes = operands_.v_tile(rows_.tile + tile, item_.kv_head, call_.problem) + range.begin,
          .pitch = CodeProducts::pitch_of(call_.spec.tile_kv),
          .scale = operands_.v_scale + tile_flag(tile) * static_cast<std::size_t>(head_dim),
          .head_dim = head_dim,
          .num_keys = range.count};
}

void QuantizedWalk::step(QuantizedPanel& panel, std::int64_t tile, std::int64_t count) {
  const TileStep step{&panel.rows, tile, count, panel.rows.part, scratch_.forward.scores};
  multiply_keys(panel, step);
  if (rounds_qk()) {
    if (panel.mean_queries != nullptr) add_means(panel, step);
    if (panel.has_plain_rows || operands_.has_plain_keys[tile_flag(tile)] != 0)
      restore_plain(panel, step);
  }
  apply_programs(step, call_, scratch_.forward);
  if (operands_.has_plain_values[tile_flag(tile)] != 0) add_plain(panel, step);
  if (rounds_pv()) {
    add_rounded(panel, step);
  } else {
    add_values(step);
  }
}

TileSource QuantizedWalk::keys_of(std::int64_t tile, std::int64_t count) const {
  if (!rounds_qk()) return call_.key_tile(item_.sequence, item_.kv_head, tile, {});
  const std::int64_t head_dim = call_.problem.head_dim_qk;
  const std::uint16_t* const codes =
      operands_.k.wide + key_row(tile * call_.spec.tile_kv) * static_cast<std::size_t>(head_dim);
  return {.data = reinterpret_cast<const std::byte*>(codes),
          .dtype = Dtype::bf16,
          .row_stride = head_dim,
          .num_rows = count,
          .num_cols = head_dim};
}

TileSource QuantizedWalk::values_of(std::int64_t tile, std::int64_t count) const {
  if (!rounds_pv()) return call_.value_tile(item_.sequence, item_.kv_head, tile, {});
  const std::int64_t head_dim = call_.problem.head_dim_v;
  const std::int64_t row =
      item_.kv_head * operands_.num_kv_rows + rows_.kv + tile * call_.spec.tile_kv;
  return {.data = reinterpret_cast<const std::byte*>(operands_.v_wide + row * head_dim),
          .dtype = operands_.v_dtype,
          .row_stride = head_dim,
          .num_rows = count,
          .num_cols = head_dim};
}

/// Sums of codes become q · k; what the mean of k takes from every score of a row is added again.
void QuantizedWalk::multiply_keys(const QuantizedPanel& panel, const TileStep& step) {
  const KeyRange range = step.seen.range;
  const std::int64_t head_dim = call_.problem.head_dim_qk;
  if (how_.bytes.qk) {
    how_.products->scores(panel.code_queries, coded_keys(step.tile, range), head_dim,
                          {panel.scale, panel.is_unscaled ? nullptr : panel.shift}, step.scores);
    return;
  }
  kernels_.scores(panel.rows.queries, keys_, range, head_dim, panel.rows.num_vectors, step.scores,
                  next_);
  if (rounds_qk()) {
    const std::size_t first = key_row(step.tile * call_.spec.tile_kv + range.begin);
    how_.steps->dequantize(step.scores, range.count, operands_.k.scale + first, panel.scale,
                           panel.shift);
  }
}

/// Block means of q times the keys as they are.
void QuantizedWalk::add_means(const QuantizedPanel& panel, const TileStep& step) {
  const TileSource source = call_.key_tile(item_.sequence, item_.kv_head, step.tile, {});
  const KeyTile keys = kernels_.load_keys(source, scratch_.mean_keys);
  kernels_.scores(panel.mean_queries, keys, step.seen.range, call_.problem.head_dim_qk,
                  panel.rows.num_vectors, scratch_.mean_scores, next_);
  const std::int64_t count = step.seen.range.count * call_.spec.lanes;
  for (std::int64_t i = 0; i < count; ++i) step.scores[i] += scratch_.mean_scores[i];
}

/// Products with rows that are not finite, as they are: none is finite, so scales and shifts do not matter. Of codes
/// that is NaN.
void QuantizedWalk::restore_plain(const QuantizedPanel& panel, const TileStep& step) const {
  const KeyRange range = step.seen.range;
  const std::int64_t first = step.tile * call_.spec.tile_kv + range.begin;
  const Sequence& s = item_.sequence;
  const RowPanel& rows = panel.rows;
  const bool is_of_codes = are_codes(call_.args.q.dtype());
  std::vector<double> query, key;  // grow where such a row is met
  for (std::int64_t lane = 0; lane < rows.rows.num_rows(); ++lane) {
    const bool is_plain_query = operands_.q.is_plain[query_row(rows, lane)] != 0;
    for (std::int64_t i = 0; i < range.count; ++i) {
      if (!is_plain_query && operands_.k.is_plain[key_row(first + i)] == 0) continue;
      float& score = step.scores[i * call_.spec.lanes + lane];
      if (is_of_codes) {
        score = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      query.resize(static_cast<std::size_t>(call_.problem.head_dim_qk));
      key.resize(query.size());
      load_row(call_.args.q, {s.batch_offset, s.q_begin + rows.q_idx[lane], rows.q_head[lane]},
               query);
      load_row(call_.args.k, {s.batch_offset, s.kv_begin + first + i, item_.kv_head}, key);
      score = static_cast<float>(dot(query, key));
    }
  }
}

/// Values that are not finite, to the rows that see them. Of codes those have no scale.
void QuantizedWalk::add_plain(QuantizedPanel& panel, const TileStep& step) const {
  panel.extra.resize(kernels_.output_bytes(call_.problem.head_dim_v) / sizeof(float));
  ForwardScratch scratch = scratch_.forward;
  scratch.extra = panel.extra.data();
  TileSource values = call_.value_tile(item_.sequence, item_.kv_head, step.tile, {});
  std::vector<float> ones;
  if (are_codes(values.dtype)) {
    ones.assign(static_cast<std::size_t>(call_.spec.tile_kv), 1.0F);
    values.scales = ones.data();
  }
  collect_non_finite(step, values, call_, scratch);
}

void QuantizedWalk::add_values(const TileStep& step) {
  const RowPanel& panel = *step.panel;
  kernels_.softmax(step.scores, step.seen.range.count, panel.num_vectors,
                   call_.unit * std::numbers::log2e_v<float>, panel.state, dropout_of(step, call_));
  kernels_.accumulate(scratch_.forward.values, step.num_keys, step.seen.range, step.scores,
                      call_.problem.head_dim_v, panel.num_vectors, panel.state.rescale, panel.out,
                      next_);
}

/// The product of codes by itself, then its scales.
void QuantizedWalk::add_rounded(const QuantizedPanel& panel, const TileStep& step) {
  const std::int64_t head_dim = call_.problem.head_dim_v;
  const KeyRange range = step.seen.range;
  const QuantizedTile tile{.scores = step.scores,
                           .num_keys = range.count,
                           .octaves = panel.octaves,
                           .common = panel.common};
  const PanelDropout dropout = dropout_of(step, call_);
  if (how_.bytes.pv) {
    how_.products->round_probabilities(tile, dropout, panel.sums);
    how_.products->accumulate(coded_values(step.tile, range), step.scores, panel.sums,
                              panel.rows.out);
    return;
  }
  const float* const scale =
      operands_.v_scale + tile_flag(step.tile) * static_cast<std::size_t>(head_dim);
  how_.steps->round_probabilities(quant_, tile, dropout, panel.sums);
  if (kernels_.pack_probabilities != nullptr) kernels_.pack_probabilities(step.scores, range.count);
  kernels_.accumulate(scratch_.forward.values, step.num_keys, range, step.scores, head_dim,
                      panel.rows.num_vectors, scratch_.zeros, scratch_.tile_out, next_);
  how_.steps->add_scaled(scratch_.tile_out, scale, head_dim, panel.sums, panel.rows.out);
  // The next panel's products overwrite these by zero times what is there.
  if (has_nan(panel.sums.row_sum, call_.spec.lanes)) clear_tile_out();
}

void QuantizedWalk::finish(QuantizedPanel& panel, const ForwardResults& results) const {
  const std::int64_t lanes = call_.spec.lanes;
  const std::int64_t width = call_.problem.head_dim_v;
  const bool has_mean = rounds_pv() && quant_.smooth_v != Smoothing::none;
  const float* const mean =
      operands_.v_mean +
      (item_.sequence.index * call_.problem.num_heads_kv + item_.kv_head) * width;
  const float* const kept = call_.dropout.threshold > 0 ? panel.sums.kept_sum : panel.sums.row_sum;
  for (std::int64_t d = 0; has_mean && d < width; ++d) {
    for (std::int64_t lane = 0; lane < panel.rows.rows.num_rows(); ++lane)
      panel.rows.out[d * lanes + lane] += mean[d] * kept[lane];
  }
  for (std::size_t i = 0; i < panel.extra.size(); ++i) panel.rows.out[i] += panel.extra[i];
  for (std::int64_t lane = 0; panel.is_unscaled && lane < lanes; ++lane) {
    for (float* score : {panel.sums.row_max + lane, panel.sums.origin + lane})
      *score = *score * panel.scale[lane] + panel.shift[lane];
  }
  emit_states(panel.rows, ~LaneSet{0}, call_, scratch_.forward,
              [&](const ForwardItem& rows, std::int64_t lane, float* state) {
                results.finish_row(rows, lane, state);
              });
}

}  // namespace fovea::cpu
