// Forward mode over tiles, for one panel of queries at a time. Read attention_forward.cpp first: this is the same walk,
// with a tangent beside everything.
//
//   for each work item (sequence, kv head, panel of rows):
//     for each kv tile that some row can see:
//       S = scale K Qᵀ;  S' = scale (K Q'ᵀ + K' Qᵀ)
//       S' = f_s(S) S' + g(S);  S = f(S)     the program f, its derivative by the score, what captured tangents add
//       S = mask(S);  S' = 0 where S = -inf
//       P, max, sum = softmax(S);  m = the mean of S' - r over all keys so far;  T = T - m O;  r = r + m
//       S' = S' - r;  c = c * rescale - m * (the sum before) + Σ P S'
//       O = O * rescale + Vᵀ P;  T = T * rescale + Vᵀ (P S') + V'ᵀ P
//     out = O / sum,  lse = log sum;  lse' = r + c / sum,  out' = T / sum - (c / sum) out
//
// r is the mean of S' over the keys so far: what all tangents of a row have in common would cancel in out', and is
// taken out before it costs digits. A mean of the first tile alone would not do: a later tile may outweigh it, and
// products in bf16 would round differences that are far larger than those that remain. c is what rounding leaves.
//
// Bits depend on a row's own sequence alone, for the reasons given there. NaN and infinity in values that nobody sees
// are dealt with as there too: a panel that is not finite is walked again without them.
#include "cpu/attention_jvp.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <string>
#include <vector>

#include "core/scalar_io.hpp"
#include "cpu/attention_forward.hpp"
#include "cpu/carver.hpp"
#include "cpu/kernels/gradient.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"
#include "cpu/visible_keys.hpp"
#include "expr/differentiate.hpp"
#include "expr/passes.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// What a worker writes while it computes an item. Tangents end in _tangent; [lanes] unless said.
struct JvpScratch {
  std::byte *queries = nullptr, *queries_tangent = nullptr;  // packed panels
  std::byte *keys = nullptr, *keys_tangent = nullptr;        // converted tiles
  std::byte *values = nullptr, *values_tangent = nullptr;
  float *scores = nullptr, *scores_tangent = nullptr;  // a panel's tile each
  float* work = nullptr;                               // another
  float *out = nullptr, *out_tangent = nullptr;        // Oᵀ and Tᵀ
  float *extra = nullptr, *extra_tangent = nullptr;    // careful pass: what is not finite, as out
  float *row_max = nullptr, *row_sum = nullptr, *rescale = nullptr;
  float *sum_tangent = nullptr, *centre = nullptr;  // c and r
  float *sum_before = nullptr, *shift = nullptr;    // of this tile: the past's sum, rescaled, and m
  float* ones = nullptr;                            // a rescale that changes nothing
  float *dropout_max = nullptr, *dropout_sum = nullptr, *dropout_rescale = nullptr;
  std::int32_t *q_idx = nullptr, *q_head = nullptr;
  const std::byte** rows = nullptr;
  float *row = nullptr, *row_tangent = nullptr;  // [head_dim_v]
  std::byte* program = nullptr;

  static JvpScratch carve(Carver& carver, const ForwardSpec& spec, const ForwardProblem& problem,
                          const PanelKernels& kernels, std::size_t program_bytes) {
    const auto lanes = static_cast<std::size_t>(spec.lanes);
    const auto width = static_cast<std::size_t>(problem.head_dim_v);
    const std::size_t score_floats = kernels.score_bytes(spec.tile_kv) / sizeof(float);
    const std::size_t out_floats = kernels.output_bytes(problem.head_dim_v) / sizeof(float);
    JvpScratch s;
    for (std::byte** piece : {&s.queries, &s.queries_tangent})
      *piece = carver.take<std::byte>(kernels.query_bytes(problem.head_dim_qk));
    for (std::byte** piece : {&s.keys, &s.keys_tangent})
      *piece = carver.take<std::byte>(kernels.key_bytes(spec.tile_kv, problem.head_dim_qk));
    for (std::byte** piece : {&s.values, &s.values_tangent})
      *piece = carver.take<std::byte>(kernels.value_bytes(spec.tile_kv, problem.head_dim_v));
    for (float** piece : {&s.scores, &s.scores_tangent, &s.work})
      *piece = carver.take<float>(score_floats);
    for (float** piece : {&s.out, &s.out_tangent, &s.extra, &s.extra_tangent})
      *piece = carver.take<float>(out_floats);
    for (float** piece :
         {&s.row_max, &s.row_sum, &s.rescale, &s.sum_tangent, &s.centre, &s.sum_before, &s.shift,
          &s.ones, &s.dropout_max, &s.dropout_sum, &s.dropout_rescale})
      *piece = carver.take<float>(lanes);
    for (std::int32_t** piece : {&s.q_idx, &s.q_head}) *piece = carver.take<std::int32_t>(lanes);
    s.rows = carver.take<const std::byte*>(lanes);
    for (float** piece : {&s.row, &s.row_tangent}) *piece = carver.take<float>(width);
    s.program = carver.take<std::byte>(program_bytes);
    return s;
  }
};

/// The dot products that round P once it has been read in fp32. Tiles of AMX have no such steps for panels that are
/// rescaled; every processor with tiles has the dot products too.
constexpr CpuTarget kBf16Target = CpuTarget::avx512_bf16;

const PanelKernels& step_kernels(const ForwardSpec& spec) {
  if (spec.is_split) return plain_kernels(spec);
  const PanelKernels& kernels = forward_kernels(spec);
  return kernels.product == Dtype::bf16 ? *gradient_panel_kernels(kBf16Target) : kernels;
}

/// Rows [row_begin, row_end) of one kv head, at most a panel. Row r is query r % seqlen_q of head
/// kv_head * group + r / seqlen_q.
struct Item {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t row_begin = 0, row_end = 0;

  std::int64_t num_rows() const { return row_end - row_begin; }
};

/// All of a call's workspace.
struct JvpMemory {
  std::int64_t* first_item = nullptr;  // [num_sequences + 1]
  std::vector<JvpScratch> workers;

  static JvpMemory carve(Carver& carver, const ForwardProblem& problem, const JvpPlan& plan) {
    JvpMemory m;
    m.first_item = carver.take<std::int64_t>(static_cast<std::size_t>(problem.num_sequences) + 1);
    for (int worker = 0; worker < plan.forward.num_workers; ++worker) {
      m.workers.push_back(JvpScratch::carve(carver, plan.forward.spec, problem,
                                            step_kernels(plan.forward.spec), plan.program_bytes));
    }
    return m;
  }
};

class JvpRun {
 public:
  JvpRun(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
         std::byte* workspace, Executor& executor)
      : problem_(problem.forward),
        args_(args),
        plan_(plan),
        spec_(plan.forward.spec),
        kernels_(step_kernels(spec_)),
        pack_(kernels_.product == Dtype::bf16 ? gradient_kernels(kBf16Target)->pack_gradients
                                              : nullptr),
        lanes_(spec_.lanes),
        executor_(executor),
        score_bindings_(plan.forward.score.bindings(args.forward.score)),
        mask_bindings_(plan.forward.mask.bindings(args.forward.mask)),
        by_score_bindings_(plan.by_score.bindings(args.forward.score)),
        by_captured_bindings_(plan.by_captured.bindings(captures_with_tangents(
            args.forward.score, plan.tangent_slots, args.captured_tangents))),
        dropout_(panel_dropout(args.forward)),
        carver_(workspace),
        memory_(JvpMemory::carve(carver_, problem_, plan)) {
    if (!plan.mapper) own_mapper_.emplace(args.forward.mask, kSubTileKeys);
    for (const JvpScratch& s : memory_.workers) std::fill_n(s.ones, lanes_, 1.0F);
    memory_.first_item[0] = 0;
    for (std::int64_t i = 0; i < problem_.num_sequences; ++i)
      memory_.first_item[i + 1] = memory_.first_item[i] + num_items(sequence(i));
  }

  void run() {
    clear_padding_rows();
    run_tasks(executor_, memory_.first_item[problem_.num_sequences],
              [this](int worker, std::int64_t index) { compute_item(worker, index); });
  }

 private:
  // ---- work items ----

  const mask::BlockMapper& mapper() const { return plan_.mapper ? *plan_.mapper : *own_mapper_; }

  Sequence sequence(std::int64_t index) const {
    return sequence_at(problem_, args_.forward, index);
  }

  std::int64_t num_panels(const Sequence& s) const {
    return ceil_div(problem_.group * s.seqlen_q, lanes_);
  }

  std::int64_t num_items(const Sequence& s) const {
    return problem_.num_heads_q == 0 ? 0 : num_panels(s) * problem_.num_heads_kv;
  }

  Item item_at(std::int64_t index) const {
    const std::int64_t* const first = memory_.first_item;
    const std::int64_t* const found =
        std::upper_bound(first, first + problem_.num_sequences + 1, index) - 1;
    const Sequence s = sequence(found - first);
    const std::int64_t panels = num_panels(s);
    const std::int64_t rest = index - *found;
    const std::int64_t panel = panels - 1 - rest % panels;  // causal masks: the longest rows first
    return {.sequence = s,
            .kv_head = rest / panels,
            .row_begin = panel * lanes_,
            .row_end = std::min(problem_.group * s.seqlen_q, (panel + 1) * lanes_)};
  }

  // ---- one item ----

  void compute_item(int worker, std::int64_t index) const {
    const JvpScratch& s = memory_.workers[static_cast<std::size_t>(worker)];
    const Item item = item_at(index);
    start_panel(item, s);
    walk_tiles(item, s, /*is_careful=*/false);
    if (!is_finite(item, s)) walk_tiles(item, s, /*is_careful=*/true);
    for (std::int64_t lane = 0; lane < item.num_rows(); ++lane) finish_row(item, lane, s);
  }

  int num_vectors(const Item& item) const {
    return static_cast<int>(ceil_div(item.num_rows(), kernels_.vector_lanes));
  }

  void start_panel(const Item& item, const JvpScratch& s) const {
    for (std::int64_t lane = 0; lane < lanes_; ++lane) {
      // Padding lanes repeat the last row, so that programs read what exists.
      const std::int64_t row = item.row_begin + std::min(lane, item.num_rows() - 1);
      s.q_idx[lane] = static_cast<std::int32_t>(row % item.sequence.seqlen_q);
      s.q_head[lane] =
          static_cast<std::int32_t>(item.kv_head * problem_.group + row / item.sequence.seqlen_q);
    }
    pack_queries(args_.forward.q, item, s, s.queries);
    if (args_.q_tangent) pack_queries(args_.q_tangent, item, s, s.queries_tangent);
  }

  void pack_queries(const TensorView& view, const Item& item, const JvpScratch& s,
                    std::byte* packed) const {
    const Rows rows(view);
    for (std::int64_t lane = 0; lane < lanes_; ++lane) {
      s.rows[lane] = lane < item.num_rows()
                         ? rows.at(item.sequence.batch_offset,
                                   item.sequence.q_begin + s.q_idx[lane], s.q_head[lane])
                         : nullptr;
    }
    kernels_.pack_queries(s.rows, rows.dtype, rows.col_stride, problem_.head_dim_qk, packed);
  }

  void walk_tiles(const Item& item, const JvpScratch& s, bool is_careful) const {
    std::fill_n(s.row_max, lanes_, -kInfinity);
    for (float* sums : {s.row_sum, s.sum_tangent, s.centre}) std::fill_n(sums, lanes_, 0.0F);
    for (float* sums : {s.out, s.out_tangent, s.extra, s.extra_tangent})
      std::fill_n(sums, out_floats(), 0.0F);
    VisibleKeys visible;
    mapper().row(tile_row(item.sequence, item.kv_head, s.q_idx, s.q_head, item.num_rows()),
                 visible.runs);
    const std::int64_t tile_kv = spec_.tile_kv;
    for (std::int64_t begin = 0; begin < item.sequence.seqlen_kv; begin += tile_kv) {
      const std::int64_t end = std::min(begin + tile_kv, item.sequence.seqlen_kv);
      const VisiblePart seen = visible.next(begin, end);
      if (seen.range.count > 0) step({item, begin, end - begin, seen, is_careful}, s);
    }
    if (is_careful) {
      add(out_floats(), s.extra, s.out);
      add(out_floats(), s.extra_tangent, s.out_tangent);
    }
  }

  struct Tile {
    const Item& item;
    std::int64_t kv_begin, num_keys;
    const VisiblePart& seen;
    bool is_careful;

    std::int64_t first_seen() const { return kv_begin + seen.range.begin; }
  };

  void step(const Tile& tile, const JvpScratch& s) const {
    const std::int64_t count = tile.seen.range.count * lanes_;
    multiply_queries(tile, s);
    run_programs(tile, s);
    for (std::int64_t i = 0; i < count; ++i)
      s.scores_tangent[i] = s.scores[i] == -kInfinity ? 0.0F : s.scores_tangent[i];
    if (tile.is_careful) {
      collect_non_finite(args_.forward.v, tile, s, /*is_tangent=*/false);
      if (args_.v_tangent) collect_non_finite(args_.v_tangent, tile, s, /*is_tangent=*/true);
    }
    normalise(tile, s);
    multiply_values(tile, s);
  }

  TileSource source_of(const TensorView& view, const Tile& tile, std::int64_t head_dim) const {
    const Rows rows(view);
    const Sequence& sequence = tile.item.sequence;
    return {.data = rows.at(sequence.batch_offset, sequence.kv_begin + tile.kv_begin,
                            tile.item.kv_head),
            .dtype = rows.dtype,
            .row_stride = rows.row_stride,
            .col_stride = rows.col_stride,
            .num_rows = tile.num_keys,
            .num_cols = head_dim};
  }

  /// S = scale K Qᵀ and S' = scale (K Q'ᵀ + K' Qᵀ).
  void multiply_queries(const Tile& tile, const JvpScratch& s) const {
    const std::int64_t head_dim = problem_.head_dim_qk;
    const KeyRange range = tile.seen.range;
    const int vectors = num_vectors(tile.item);
    NextTile nothing;
    const KeyTile keys = kernels_.load_keys(source_of(args_.forward.k, tile, head_dim), s.keys);
    kernels_.scores(s.queries, keys, range, head_dim, vectors, s.scores, nothing);
    kernels_.scale(s.scores, range.count, problem_.softmax_scale);
    std::fill_n(s.scores_tangent, range.count * lanes_, 0.0F);
    if (args_.q_tangent)
      kernels_.scores(s.queries_tangent, keys, range, head_dim, vectors, s.scores_tangent, nothing);
    if (args_.k_tangent) {
      const KeyTile tangents =
          kernels_.load_keys(source_of(args_.k_tangent, tile, head_dim), s.keys_tangent);
      kernels_.scores(s.queries, tangents, range, head_dim, vectors, s.work, nothing);
      add(static_cast<std::size_t>(range.count * lanes_), s.work, s.scores_tangent);
    }
    kernels_.scale(s.scores_tangent, range.count, problem_.softmax_scale);
  }

  ProgramTile program_tile(const Tile& tile, const JvpScratch& s, float* scores,
                           const Bindings& captured) const {
    const Item& item = tile.item;
    return {.scores = scores,
            .num_keys = tile.seen.range.count,
            .lanes = static_cast<int>(lanes_),
            .kv_begin = tile.first_seen(),
            .q_idx = s.q_idx,
            .q_head = s.q_head,
            .batch = static_cast<std::int32_t>(item.sequence.index),
            .kv_head = static_cast<std::int32_t>(item.kv_head),
            .seqlen_q = static_cast<std::int32_t>(item.sequence.seqlen_q),
            .seqlen_kv = static_cast<std::int32_t>(item.sequence.seqlen_kv),
            .tensors = captured.tensors.data(),
            .scalars = captured.scalars.data(),
            .scratch = s.program};
  }

  void run_programs(const Tile& tile, const JvpScratch& s) const {
    const std::int64_t count = tile.seen.range.count * lanes_;
    if (!plan_.by_score.empty() && (args_.q_tangent || args_.k_tangent)) {
      run_derivative(plan_.by_score, by_score_bindings_, tile, s);
      for (std::int64_t i = 0; i < count; ++i) s.scores_tangent[i] *= s.work[i];
    }
    if (!plan_.by_captured.empty()) {
      run_derivative(plan_.by_captured, by_captured_bindings_, tile, s);
      add(static_cast<std::size_t>(count), s.work, s.scores_tangent);
    }
    if (!plan_.forward.score.empty())
      kernels_.run_score(plan_.forward.score.tape,
                         program_tile(tile, s, s.scores, score_bindings_));
    for (int i = 0; i < tile.seen.num_partial; ++i) {
      const KeyRange part = tile.seen.partial[static_cast<std::size_t>(i)];
      ProgramTile masked = program_tile(
          tile, s, s.scores + (part.begin - tile.seen.range.begin) * lanes_, mask_bindings_);
      masked.num_keys = part.count;
      masked.kv_begin = tile.kv_begin + part.begin;
      kernels_.run_mask(plan_.forward.mask.tape, masked);
    }
  }

  /// work = the derivative at S.
  void run_derivative(const BoundTape& derivative, const Bindings& bindings, const Tile& tile,
                      const JvpScratch& s) const {
    std::copy_n(s.scores, tile.seen.range.count * lanes_, s.work);
    kernels_.run_score(derivative.tape, program_tile(tile, s, s.work, bindings));
  }

  /// S becomes P, work becomes P (S' - r); both without what dropout takes.
  void normalise(const Tile& tile, const JvpScratch& s) const {
    const std::int64_t num_keys = tile.seen.range.count;
    std::copy_n(s.row_sum, lanes_, s.sum_before);
    kernels_.softmax(s.scores, num_keys, num_vectors(tile.item), std::numbers::log2e_v<float>,
                     {s.row_max, s.row_sum, s.rescale}, {});
    for (std::int64_t lane = 0; lane < lanes_; ++lane) {
      s.sum_before[lane] *= s.rescale[lane];
      s.sum_tangent[lane] *= s.rescale[lane];
    }
    move_centre(num_keys, s);
    for (std::int64_t key = 0; key < num_keys; ++key) {
      for (std::int64_t lane = 0; lane < lanes_; ++lane) {
        const std::int64_t i = key * lanes_ + lane;
        s.work[i] = s.scores[i] * (s.scores_tangent[i] - s.centre[lane]);
        s.sum_tangent[lane] += s.work[i];
      }
    }
    if (dropout_.threshold > 0) drop(tile, s);
  }

  /// r becomes the mean of S' over all keys so far; the sums of the past follow.
  void move_centre(std::int64_t num_keys, const JvpScratch& s) const {
    std::copy_n(s.sum_tangent, lanes_, s.shift);
    for (std::int64_t key = 0; key < num_keys; ++key) {
      for (std::int64_t lane = 0; lane < lanes_; ++lane) {
        const std::int64_t i = key * lanes_ + lane;
        s.shift[lane] += s.scores[i] * (s.scores_tangent[i] - s.centre[lane]);
      }
    }
    for (std::int64_t lane = 0; lane < lanes_; ++lane) {
      s.shift[lane] = s.row_sum[lane] > 0 ? s.shift[lane] / s.row_sum[lane] : 0;
      s.centre[lane] += s.shift[lane];
      s.sum_tangent[lane] -= s.shift[lane] * s.sum_before[lane];
    }
    for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
      for (std::int64_t lane = 0; lane < lanes_; ++lane) {
        const std::int64_t i = d * lanes_ + lane;
        s.out_tangent[i] -= s.shift[lane] * s.out[i];
      }
    }
  }

  /// The softmax of equal scores without a past is 1 everywhere, so that dropout leaves its own factors: 0 or 1 / (1 -
  /// p).
  void drop(const Tile& tile, const JvpScratch& s) const {
    PanelDropout dropout = dropout_;
    dropout.batch = static_cast<std::uint32_t>(tile.item.sequence.index);
    dropout.kv_begin = tile.first_seen();
    dropout.q_idx = s.q_idx;
    dropout.q_head = s.q_head;
    const std::int64_t count = tile.seen.range.count * lanes_;
    std::fill_n(s.scores_tangent, count, 0.0F);
    std::fill_n(s.dropout_max, lanes_, -kInfinity);
    std::fill_n(s.dropout_sum, lanes_, 0.0F);
    kernels_.softmax(s.scores_tangent, tile.seen.range.count, num_vectors(tile.item), 1,
                     {s.dropout_max, s.dropout_sum, s.dropout_rescale}, dropout);
    for (std::int64_t i = 0; i < count; ++i) {
      s.scores[i] *= s.scores_tangent[i];
      s.work[i] *= s.scores_tangent[i];
    }
  }

  /// O = O * rescale + Vᵀ P and T = T * rescale + Vᵀ (P S') + V'ᵀ P.
  void multiply_values(const Tile& tile, const JvpScratch& s) const {
    const std::int64_t head_dim = problem_.head_dim_v;
    const KeyRange range = tile.seen.range;
    const int vectors = num_vectors(tile.item);
    NextTile nothing;
    if (pack_ != nullptr)
      pack_({.scores = s.scores, .products = s.work, .num_keys = range.count, .lanes = lanes_});
    kernels_.load_values(source_of(args_.forward.v, tile, head_dim), tile.is_careful, s.values);
    kernels_.accumulate(s.values, tile.num_keys, range, s.scores, head_dim, vectors, s.rescale,
                        s.out, nothing);
    kernels_.accumulate(s.values, tile.num_keys, range, s.work, head_dim, vectors, s.rescale,
                        s.out_tangent, nothing);
    if (!args_.v_tangent) return;
    kernels_.load_values(source_of(args_.v_tangent, tile, head_dim), tile.is_careful,
                         s.values_tangent);
    kernels_.accumulate(s.values_tangent, tile.num_keys, range, s.scores, head_dim, vectors, s.ones,
                        s.out_tangent, nothing);
  }

  static void add(std::size_t count, const float* from, float* to) {
    for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
  }

  // ---- values that are not finite ----

  std::size_t out_floats() const {
    return kernels_.output_bytes(problem_.head_dim_v) / sizeof(float);
  }

  bool is_finite(const Item& item, const JvpScratch& s) const {
    for (std::int64_t lane = 0; lane < item.num_rows(); ++lane) {
      if (!std::isfinite(s.row_sum[lane]) || !std::isfinite(s.sum_tangent[lane])) return false;
    }
    return kernels_.is_finite(s.out, problem_.head_dim_v, num_vectors(item)) &&
           kernels_.is_finite(s.out_tangent, problem_.head_dim_v, num_vectors(item));
  }

  /// Adds what values (or their tangents) that are not finite give to the rows that see them: S is -inf where a key is
  /// hidden.
  void collect_non_finite(const TensorView& view, const Tile& tile, const JvpScratch& s,
                          bool is_tangent) const {
    const TileSource values = source_of(view, tile, problem_.head_dim_v);
    const KeyRange range = tile.seen.range;
    for (std::int64_t i = 0; i < range.count; ++i) {
      for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
        const std::int64_t at = (range.begin + i) * values.row_stride + d * values.col_stride;
        const float value = as_multiplied(load_scalar(values.data, values.dtype, at));
        if (std::isfinite(value)) continue;
        for (std::int64_t lane = 0; lane < lanes_; ++lane) {
          const std::int64_t score = i * lanes_ + lane;
          if (s.scores[score] == -kInfinity) continue;
          if (!is_tangent) s.extra[d * lanes_ + lane] += value;
          s.extra_tangent[d * lanes_ + lane] +=
              is_tangent ? value : value * s.scores_tangent[score];
        }
      }
    }
  }

  /// A value as the products see it: bf16 rounds the largest fp32 numbers to infinity.
  float as_multiplied(float value) const {
    return kernels_.product == Dtype::bf16 ? static_cast<float>(bfloat16(value)) : value;
  }

  // ---- results ----

  /// What a row's sums are multiplied by, its lse, and the share of the sink in its denominator.
  struct Denominator {
    double factor = 0;
    double lse = -kInfinity;
    double sink_probability = 0;
  };

  Denominator denominator(double row_max, double row_sum, std::int64_t q_head) const {
    const bool is_empty = row_sum == 0;
    const TensorView& sinks = args_.forward.sinks;
    const double sink =
        sinks ? static_cast<const float*>(sinks.data())[q_head * sinks.stride(0)] : -kInfinity;
    const double top = largest_of(is_empty ? -kInfinity : row_max, sink);
    if (is_empty && top == -kInfinity) return {};
    const double own = is_empty ? 0 : std::exp(row_max - top);
    const double share = sink_share(sink, top);
    const double total = row_sum * own + share;
    return {is_empty ? 0 : own / total, top + std::log(total), share / total};
  }

  void finish_row(const Item& item, std::int64_t lane, const JvpScratch& s) const {
    const std::int64_t width = problem_.head_dim_v;
    const std::int64_t q_head = s.q_head[lane];
    const Denominator d = denominator(s.row_max[lane], s.row_sum[lane], q_head);
    const double centre = s.centre[lane];
    // lse' - r; the sink, whose own tangent is not centred, has value 0.
    double mean = d.factor * s.sum_tangent[lane] - d.sink_probability * centre;
    if (const TensorView& sinks = args_.sinks_tangent; sinks && d.sink_probability > 0) {
      mean +=
          d.sink_probability * static_cast<const float*>(sinks.data())[q_head * sinks.stride(0)];
    }
    kernels_.extract_rows(s.out, {lane, 1}, width, s.row, width);
    kernels_.extract_rows(s.out_tangent, {lane, 1}, width, s.row_tangent, width);
    for (std::int64_t i = 0; i < width; ++i) {
      const double out = d.factor * s.row[i];
      const double tangent = d.factor * s.row_tangent[i] - (out == 0 ? 0 : mean * out);
      s.row[i] = static_cast<float>(out);
      s.row_tangent[i] = static_cast<float>(tangent);
    }
    write({item.sequence, s.q_idx[lane], q_head}, s, {d.lse, centre + mean});
  }

  struct RowPlace {
    const Sequence& sequence;
    std::int64_t q_idx, q_head;
  };
  struct RowLse {
    double value, tangent;
  };

  /// s.row and s.row_tangent, and the two numbers.
  void write(const RowPlace& at, const JvpScratch& s, const RowLse& lse) const {
    store_row(args_.forward.out, at, s.row);
    store_row(args_.out_tangent, at, s.row_tangent);
    store_value(args_.forward.lse, at, lse.value);
    store_value(args_.lse_tangent, at, lse.tangent);
  }

  void store_row(const TensorView& view, const RowPlace& at, const float* row) const {
    const Rows rows(view);
    kernels_.store_row(
        row, 1, problem_.head_dim_v, rows.dtype, rows.col_stride,
        rows.at(at.sequence.batch_offset, at.sequence.q_begin + at.q_idx, at.q_head));
  }

  void store_value(const TensorView& view, const RowPlace& at, double value) const {
    if (!view) return;
    const std::int64_t offset = row_value_offset(view, at.sequence, at.q_idx, at.q_head);
    static_cast<float*>(view.mutable_data())[offset] = static_cast<float>(value);
  }

  /// Packed rows behind the last sequence belong to nobody: out 0, lse -inf, tangents 0.
  void clear_padding_rows() const {
    if (!problem_.is_varlen) return;
    const JvpScratch& s = memory_.workers.front();
    for (float* row : {s.row, s.row_tangent}) std::fill_n(row, problem_.head_dim_v, 0.0F);
    for (std::int64_t row = cu_seqlen(args_.forward.cu_seqlens_q, problem_.num_sequences);
         row < problem_.total_q; ++row) {
      const Sequence nobody{.q_begin = row};
      for (std::int64_t head = 0; head < problem_.num_heads_q; ++head)
        write({nobody, 0, head}, s, {-kInfinity, 0});
    }
  }

  const ForwardProblem& problem_;
  const AttentionJvp& args_;
  const JvpPlan& plan_;
  const ForwardSpec& spec_;
  const PanelKernels& kernels_;
  // As products want P and P (S' - r); null: as they are.
  void (*const pack_)(const SoftmaxGradient&);
  const std::int64_t lanes_;
  Executor& executor_;
  std::optional<mask::BlockMapper> own_mapper_;  // where the plan has none
  const Bindings score_bindings_, mask_bindings_, by_score_bindings_, by_captured_bindings_;
  const PanelDropout dropout_;
  Carver carver_;
  const JvpMemory memory_;
};

void prepare_programs(const TangentProblem& problem, JvpPlan& plan) {
  const ScoreMod& score = problem.forward.problem.score;
  const MaskMod& mask = problem.forward.problem.mask;
  if (!score.is_identity()) {
    const expr::NodePtr formula = score.expr().shared();
    const std::vector<CapturedTensor> tangents = captured_tangents_of(problem.posed);
    const expr::NodePtr derivative = expr::derivative_by_score(formula);
    if (derivative->op != expr::Op::constant || derivative->float_value != 1)
      plan.by_score = {derivative, score.captures()};
    plan.tangent_slots = expr::tangent_slots(formula, tangents);
    if (const expr::NodePtr tangent = expr::captured_tangent(formula, tangents))
      plan.by_captured = {tangent, captures_with_tangents(score, plan.tangent_slots, tangents)};
  }
  plan.program_bytes = plan.forward.program_bytes;
  for (const BoundTape* tape : {&plan.by_score, &plan.by_captured}) {
    if (tape->empty()) continue;
    plan.program_bytes = std::max(plan.program_bytes,
                                  program_scratch_bytes(tape->tape, plan.forward.spec.tile_kv,
                                                        static_cast<int>(plan.forward.spec.lanes)));
  }
  if (mask.captures().tensors.empty() && mask.captures().scalars.empty())
    plan.mapper.emplace(mask, kSubTileKeys);
}

void prepare(const TangentProblem& problem, JvpPlan& plan) {
  prepare_programs(problem, plan);
  Carver carver(nullptr);
  JvpMemory::carve(carver, problem.forward, plan);
  plan.workspace_bytes = carver.used();
}

}  // namespace

JvpPlan plan_jvp(const TangentProblem& problem, int num_threads) {
  JvpPlan plan{.forward = plan_forward(problem.forward, num_threads)};
  prepare(problem, plan);
  return plan;
}

JvpPlan try_plan_jvp(const TangentProblem& problem, int num_threads) {
  JvpPlan plan{.forward = try_plan_forward(problem.forward, num_threads)};
  if (!plan.forward.candidate.empty()) prepare(problem, plan);
  return plan;
}

Dtype jvp_product(const JvpPlan& plan) { return step_kernels(plan.forward.spec).product; }

void attention_jvp(const TangentProblem& problem, const JvpPlan& plan, const AttentionJvp& args,
                   std::byte* workspace, Executor& executor) {
  JvpRun(problem, plan, args, workspace, executor).run();
}

}  // namespace fovea::cpu
