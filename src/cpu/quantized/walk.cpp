#include "cpu/quantized/walk.hpp"

#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "cpu/forward/non_finite.hpp"
#include "cpu/plain_panel.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

QuantizedScratch QuantizedScratch::carve(Carver& carver, const ForwardSpec& spec,
                                         const ForwardProblem& f, std::size_t program_bytes) {
  const PanelKernels& kernels = forward_kernels(spec);
  const auto lanes = static_cast<std::size_t>(spec.lanes);
  QuantizedScratch s;
  s.forward = {
      WorkerScratch::carve(carver, spec, kernels, f.head_dim_qk, f.head_dim_v, program_bytes)};
  s.tile_out = carver.take<float>(kernels.output_bytes(f.head_dim_v) / sizeof(float));
  for (float** of_lanes : {&s.zeros, &s.weight, &s.kept_sum}) *of_lanes = carver.take<float>(lanes);
  if (f.problem.quant.smooth_q != Smoothing::none) {
    s.mean_scores = carver.take<float>(kernels.score_bytes(spec.tile_kv) / sizeof(float));
    s.mean_queries = carver.take<std::byte>(kernels.query_bytes(f.head_dim_qk));
  }
  return s;
}

QuantizedWalk::QuantizedWalk(const ForwardCall& call, const QuantizedOperands& operands,
                             const ForwardItem& item, const QuantizedScratch& scratch)
    : call_(call),
      quant_(call.problem.problem.quant),
      kernels_(call.kernels),
      operands_(operands),
      item_(item),
      scratch_(scratch),
      rows_(operand_rows(call.problem, item.sequence)),
      panel_(panels_of(call, item, scratch.forward).front()) {}

std::size_t QuantizedWalk::query_row(std::int64_t lane) const {
  const std::int64_t row = rows_.q + panel_.q_idx[lane];
  return static_cast<std::size_t>(row * call_.problem.num_heads_q + panel_.q_head[lane]);
}

std::size_t QuantizedWalk::key_row(std::int64_t kv_idx) const {
  return static_cast<std::size_t>((rows_.kv + kv_idx) * call_.problem.num_heads_kv + item_.kv_head);
}

void QuantizedWalk::run(const ForwardResults& results) {
  start(panel_, call_, kernels_, scratch_.forward);
  if (rounds_qk()) pack();
  if (scratch_.mean_queries != nullptr) pack_means();
  const std::size_t out_floats = kernels_.output_bytes(call_.problem.head_dim_v) / sizeof(float);
  std::fill_n(scratch_.forward.extra, out_floats, 0.0F);
  std::fill_n(scratch_.tile_out, out_floats, 0.0F);
  for (float* of_lanes : {scratch_.zeros, scratch_.weight, scratch_.kept_sum})
    std::fill_n(of_lanes, call_.spec.lanes, 0.0F);
  const std::int64_t tiles = ceil_div(item_.sequence.seqlen_kv, call_.spec.tile_kv);
  for (std::int64_t tile = 0; tile < tiles; ++tile) step(tile);
  finish(results);
}

/// Codes in the place of the queries that start() packed.
void QuantizedWalk::pack() {
  const std::byte** const rows = scratch_.forward.rows;
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane) {
    const bfloat16* const codes =
        operands_.q.codes + query_row(lane) * static_cast<std::size_t>(call_.problem.head_dim_qk);
    rows[lane] = lane < item_.num_rows() ? reinterpret_cast<const std::byte*>(codes) : nullptr;
  }
  kernels_.pack_queries(rows, Dtype::bf16, 1, call_.problem.head_dim_qk, panel_.queries);
}

void QuantizedWalk::pack_means() {
  const std::byte** const rows = scratch_.forward.rows;
  const std::int64_t heads = call_.problem.num_heads_q;
  for (std::int64_t lane = 0; lane < call_.spec.lanes; ++lane) {
    const std::int64_t first = panel_.q_idx[lane] - panel_.q_idx[lane] % quant_.block_q;
    const float* const mean = operands_.q_mean + ((rows_.q + first) * heads + panel_.q_head[lane]) *
                                                     call_.problem.head_dim_qk;
    rows[lane] = lane < item_.num_rows() ? reinterpret_cast<const std::byte*>(mean) : nullptr;
  }
  kernels_.pack_queries(rows, Dtype::f32, 1, call_.problem.head_dim_qk, scratch_.mean_queries);
}

// ---- one tile ----

void QuantizedWalk::step(std::int64_t tile) {
  const std::int64_t begin = tile * call_.spec.tile_kv;
  const std::int64_t end = std::min(begin + call_.spec.tile_kv, item_.sequence.seqlen_kv);
  panel_.part = panel_.keys.next(begin, end);
  if (panel_.part.range.count == 0) return;
  const KeyTile keys = kernels_.load_keys(keys_of(tile, end - begin), scratch_.forward.keys);
  kernels_.load_values(values_of(tile, end - begin), /*is_careful=*/true, scratch_.forward.values);
  float* const scores = scratch_.forward.scores;
  kernels_.scores(panel_.queries, keys, panel_.part.range, call_.problem.head_dim_qk,
                  panel_.num_vectors, scores, next_);
  const TileStep step{&panel_, tile, end - begin, panel_.part, scores};
  if (rounds_qk()) {
    dequantize(step);
    if (scratch_.mean_queries != nullptr) add_means(step);
    restore_plain(step);
  }
  apply_programs(step, call_, scratch_.forward);
  collect_non_finite(step, call_.value_tile(item_.sequence, item_.kv_head, tile, nullptr), call_,
                     scratch_.forward);
  if (rounds_pv()) {
    add_rounded(step);
  } else {
    add_values(step);
  }
}

TileSource QuantizedWalk::keys_of(std::int64_t tile, std::int64_t count) const {
  if (!rounds_qk()) return call_.key_tile(item_.sequence, item_.kv_head, tile, nullptr);
  const std::int64_t head_dim = call_.problem.head_dim_qk;
  const bfloat16* const codes =
      operands_.k.codes + key_row(tile * call_.spec.tile_kv) * static_cast<std::size_t>(head_dim);
  return {.data = reinterpret_cast<const std::byte*>(codes),
          .dtype = Dtype::bf16,
          .row_stride = call_.problem.num_heads_kv * head_dim,
          .num_rows = count,
          .num_cols = head_dim};
}

TileSource QuantizedWalk::values_of(std::int64_t tile, std::int64_t count) const {
  if (!rounds_pv()) return call_.value_tile(item_.sequence, item_.kv_head, tile, nullptr);
  const std::int64_t head_dim = call_.problem.head_dim_v;
  const std::uint16_t* const codes =
      operands_.v + key_row(tile * call_.spec.tile_kv) * static_cast<std::size_t>(head_dim);
  return {.data = reinterpret_cast<const std::byte*>(codes),
          .dtype = operands_.v_dtype,
          .row_stride = call_.problem.num_heads_kv * head_dim,
          .num_rows = count,
          .num_cols = head_dim};
}

/// Sums of codes become q · k; what the mean of k takes from every score of a row is added again.
void QuantizedWalk::dequantize(const TileStep& step) {
  const std::int64_t lanes = call_.spec.lanes;
  float* const scale = scratch_.forward.rescale;  // free until the softmax
  float* const shift = scratch_.weight;           // as well
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    scale[lane] = operands_.q.scale[query_row(lane)];
    shift[lane] = operands_.q_shift[query_row(lane)];
  }
  const KeyRange range = step.seen.range;
  const std::int64_t first = step.tile * call_.spec.tile_kv + range.begin;
  for (std::int64_t i = 0; i < range.count; ++i) {
    const float key_scale = operands_.k.scale[key_row(first + i)];
    float* const row = step.scores + i * lanes;
    for (std::int64_t lane = 0; lane < lanes; ++lane)
      row[lane] = row[lane] * (key_scale * scale[lane]) + shift[lane];
  }
}

/// Block means of q times the keys as they are.
void QuantizedWalk::add_means(const TileStep& step) {
  const TileSource source = call_.key_tile(item_.sequence, item_.kv_head, step.tile, nullptr);
  const KeyTile keys = kernels_.load_keys(source, scratch_.forward.keys);
  kernels_.scores(scratch_.mean_queries, keys, step.seen.range, call_.problem.head_dim_qk,
                  panel_.num_vectors, scratch_.mean_scores, next_);
  const std::int64_t count = step.seen.range.count * call_.spec.lanes;
  for (std::int64_t i = 0; i < count; ++i) step.scores[i] += scratch_.mean_scores[i];
}

/// Products with rows that are not finite, as they are.
void QuantizedWalk::restore_plain(const TileStep& step) {
  const KeyRange range = step.seen.range;
  const std::int64_t first = step.tile * call_.spec.tile_kv + range.begin;
  const Sequence& s = item_.sequence;
  std::vector<double> query, key;  // grow where such a row is met
  for (std::int64_t lane = 0; lane < item_.num_rows(); ++lane) {
    const bool is_plain_query = operands_.q.is_plain[query_row(lane)] != 0;
    for (std::int64_t i = 0; i < range.count; ++i) {
      if (!is_plain_query && operands_.k.is_plain[key_row(first + i)] == 0) continue;
      query.resize(static_cast<std::size_t>(call_.problem.head_dim_qk));
      key.resize(query.size());
      load_row(call_.args.q, {s.batch_offset, s.q_begin + panel_.q_idx[lane], panel_.q_head[lane]},
               query);
      load_row(call_.args.k, {s.batch_offset, s.kv_begin + first + i, item_.kv_head}, key);
      step.scores[i * call_.spec.lanes + lane] = static_cast<float>(dot(query, key));
    }
  }
}

void QuantizedWalk::add_values(const TileStep& step) {
  kernels_.softmax(step.scores, step.seen.range.count, panel_.num_vectors,
                   call_.unit * std::numbers::log2e_v<float>, panel_.state,
                   dropout_of(step, call_));
  kernels_.accumulate(scratch_.forward.values, step.num_keys, step.seen.range, step.scores,
                      call_.problem.head_dim_v, panel_.num_vectors, panel_.state.rescale,
                      panel_.out, next_);
}

/// The product of codes by itself, then its scales.
void QuantizedWalk::add_rounded(const TileStep& step) {
  const std::int64_t lanes = call_.spec.lanes;
  const PanelState& state = panel_.state;
  const float* const weight = scratch_.weight;
  round_probabilities(quant_,
                      {.scores = step.scores,
                       .num_keys = step.seen.range.count,
                       .lanes = lanes,
                       .num_rows = item_.num_rows(),
                       .unit = call_.unit},
                      dropout_of(step, call_),
                      {.row_max = state.row_max,
                       .origin = state.origin,
                       .row_sum = state.row_sum,
                       .kept_sum = scratch_.kept_sum,
                       .rescale = state.rescale,
                       .weight = scratch_.weight});
  kernels_.accumulate(scratch_.forward.values, step.num_keys, step.seen.range, step.scores,
                      call_.problem.head_dim_v, panel_.num_vectors, scratch_.zeros,
                      scratch_.tile_out, next_);
  const std::int64_t pitch = call_.problem.num_heads_kv * call_.problem.head_dim_v;
  const float* const scale = operands_.v_scale + (rows_.tile + step.tile) * pitch +
                             item_.kv_head * call_.problem.head_dim_v;
  for (std::int64_t d = 0; d < call_.problem.head_dim_v; ++d) {
    float* const out = panel_.out + d * lanes;
    const float* const codes = scratch_.tile_out + d * lanes;
    for (std::int64_t lane = 0; lane < item_.num_rows(); ++lane)
      out[lane] = out[lane] * state.rescale[lane] + weight[lane] * scale[d] * codes[lane];
  }
}

void QuantizedWalk::finish(const ForwardResults& results) {
  const std::int64_t lanes = call_.spec.lanes;
  const std::int64_t width = call_.problem.head_dim_v;
  const bool has_mean = rounds_pv() && quant_.smooth_v != Smoothing::none;
  const float* const mean =
      has_mean ? operands_.v_mean +
                     (item_.sequence.index * call_.problem.num_heads_kv + item_.kv_head) * width
               : nullptr;
  for (std::int64_t d = 0; d < width; ++d) {
    for (std::int64_t lane = 0; lane < item_.num_rows(); ++lane) {
      float& out = panel_.out[d * lanes + lane];
      if (has_mean) out += mean[d] * scratch_.kept_sum[lane];
      out += scratch_.forward.extra[d * lanes + lane];
    }
  }
  emit_states(panel_, ~LaneSet{0}, call_, scratch_.forward,
              [&](const ForwardItem& rows, std::int64_t lane, float* state) {
                results.finish_row(rows, lane, state);
              });
}

}  // namespace fovea::cpu
