// Gradients of attention over tiles, recomputing probabilities from q, k and lse.
//
//   for each row: delta = dO · O - dlse                      first, and dq = 0; or Σ P dP / Σ P - dlse (sum_delta)
//   for each work item (sequence, kv head, chunk of keys):
//     load K and V of the chunk; dK = dV = 0
//     for each few panels of queries that see the chunk:
//       pack Qᵀ, dOᵀ and their rows; dQᵀ = 0
//       for each kv tile of the chunk, for each panel that sees it:
//         S = K Qᵀ;  S = mask(program(S));  dP = V dOᵀ
//         P = exp(S - lse);  dS = P (dP - delta) program'(S)
//         dV += P dO;  dK += dS Q;  dQᵀ += Kᵀ dS
//       add dQᵀ to the sums of dq
//     write dK, dV
//   dq = its sums, in order of chunks; dsinks; captured gradients
//
// Bound: five products at the f32 multiply-add rate; see docs/kernels/attention_backward_cpu.md.
//
// Bits: a chunk is cut by the sequence's own length alone, its dK and dV are summed over the sequence's rows in order,
// and dq over tiles, then over chunks in order. That order is the same whether chunks run in turn (adding to one sum)
// or side by side (a sum each, merged in order), so threads and batch mates cannot change a bit. No atomics anywhere.
//
// NaN and infinity at hidden positions: P and dS are set to 0 there, not multiplied by 0; rows of K, Q and dO enter the
// last three products with such elements taken out, because 0 · NaN is NaN. Rows that see one have a NaN in P or dS,
// which those products carry on; only dV would lose the elements of dO, so these are added apart.
#include "cpu/attention_backward.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

#include "core/scalar_io.hpp"
#include "cpu/backward_workspace.hpp"
#include "cpu/kernels/gradient.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"
#include "cpu/visible_keys.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallestScale =
    1e-30F;  // below, scores are scaled before the mask: -inf · 0 is NaN
// Above this, rounding lse to fp32 moves P by more than 4e-6 of itself: such rows are summed again. A bias of the
// lowest float on all keys of a row is common.
constexpr float kLargeLse = 64;
constexpr std::int64_t kPanelsPerBlock = 4;  // of rows, in the stages before and after the tiles
constexpr std::size_t kMaxLanes = 64;        // of a panel on any target

/// Keys [key_begin, key_end) of one kv head, and all rows of its group.
struct Item {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t chunk = 0;
  std::int64_t key_begin = 0, key_end = 0;
};

/// Row r is query r % seqlen_q of head kv_head * group + r / seqlen_q.
struct RowRange {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t begin = 0, end = 0;
};

/// What the steps of a panel need around them.
class StepsOf {
 public:
  explicit StepsOf(const PanelKernels& kernels) : stop_(kernels.stop) {
    if (kernels.start != nullptr) kernels.start();
  }
  ~StepsOf() {
    if (stop_ != nullptr) stop_();
  }
  StepsOf(const StepsOf&) = delete;
  StepsOf& operator=(const StepsOf&) = delete;

 private:
  void (*stop_)();
};

class BackwardRun {
 public:
  BackwardRun(const GradientProblem& problem, const BackwardPlan& plan,
              const AttentionBackward& args, std::byte* workspace, Executor& executor)
      : g_(problem),
        f_(problem.forward),
        plan_(plan),
        spec_(plan.spec),
        schedule_(plan.schedule),
        args_(args),
        forward_(args.forward),
        kernels_(*gradient_panel_kernels(plan.spec.target)),
        gradient_(*gradient_kernels(plan.spec.target)),
        executor_(executor),
        q_(forward_.q),
        k_(forward_.k),
        v_(forward_.v),
        out_(forward_.out),
        dout_(args.dout),
        score_bindings_(plan.score.bindings(forward_.score)),
        mask_bindings_(plan.mask.bindings(forward_.mask)),
        derivative_bindings_(plan.derivative.bindings(forward_.score)),
        carver_(workspace),
        memory_(BackwardMemory::carve(carver_, problem, plan.schedule)),
        captured_(problem, plan.captured, plan.schedule.num_tasks, &args, carver_),
        dropout_(panel_dropout(forward_.dropout)) {
    for (int worker = 0; worker < plan.num_workers; ++worker)
      scratch_.push_back(BackwardScratch::carve(carver_, problem, plan));
    if (!plan.mapper) own_mapper_.emplace(forward_.mask, kSubTileKeys);
    mapper_ = plan.mapper ? &*plan.mapper : &*own_mapper_;
    is_prescaled_ = !plan.score.empty() || f_.softmax_scale < kSmallestScale;
    wants_score_gradients_ = problem.wants_dq() || problem.wants_dk() || !problem.captured.empty();
    count_blocks();
  }

  void run() {
    clear_padding_rows();
    for_each<&BackwardRun::prepare_rows>(num_blocks());
    if (!g_.captured.empty()) for_each<&BackwardRun::clear_captured>(captured_.num_blocks());
    for_each<&BackwardRun::compute_task>(schedule_.num_tasks);
    if (memory_.dq_sums != nullptr) for_each<&BackwardRun::write_dq>(num_blocks());
    if (g_.wants_dsinks) for_each<&BackwardRun::write_dsink>(f_.num_heads_q);
    if (!g_.captured.empty()) for_each<&BackwardRun::write_captured>(captured_.num_blocks());
  }

 private:
  template <void (BackwardRun::*kTask)(int, std::int64_t)>
  void for_each(std::int64_t count) {
    run_tasks(executor_, count,
              [this](int worker, std::int64_t index) { (this->*kTask)(worker, index); });
  }

  // ---- rows ----

  Sequence sequence(std::int64_t index) const { return sequence_at(f_, forward_, index); }
  std::int64_t num_rows(const Sequence& s) const {
    return f_.num_heads_q == 0 ? 0 : f_.group * s.seqlen_q;
  }
  std::int64_t block_rows() const { return kPanelsPerBlock * spec_.lanes; }

  void count_blocks() {
    memory_.first_block[0] = 0;
    for (std::int64_t i = 0; i < f_.num_sequences; ++i) {
      memory_.first_block[i + 1] =
          memory_.first_block[i] + ceil_div(num_rows(sequence(i)), block_rows()) * f_.num_heads_kv;
    }
  }
  std::int64_t num_blocks() const { return memory_.first_block[f_.num_sequences]; }

  RowRange block_at(std::int64_t index) const {
    const std::int64_t* end = memory_.first_block + f_.num_sequences + 1;
    const std::int64_t* found =
        std::upper_bound<const std::int64_t*>(memory_.first_block, end, index) - 1;
    const Sequence s = sequence(found - memory_.first_block);
    const std::int64_t blocks = ceil_div(num_rows(s), block_rows());
    const std::int64_t rest = index - *found;
    const std::int64_t begin = rest % blocks * block_rows();
    return {s, rest / blocks, begin, std::min(num_rows(s), begin + block_rows())};
  }

  struct Row {
    std::int64_t q_idx, q_head;
  };
  Row row_at(const RowRange& rows, std::int64_t index) const {
    return {index % rows.sequence.seqlen_q,
            rows.kv_head * f_.group + index / rows.sequence.seqlen_q};
  }

  /// Where a row stands in arrays of rows.
  std::int64_t row_id(const Sequence& s, const Row& row) const {
    if (f_.is_varlen) return row.q_head * f_.total_q + s.q_begin + row.q_idx;
    return (s.index * f_.num_heads_q + row.q_head) * s.seqlen_q + row.q_idx;
  }

  float row_value(const TensorView& view, const Sequence& s, const Row& row) const {
    return static_cast<const float*>(view.data())[row_value_offset(view, s, row.q_idx, row.q_head)];
  }

  const std::byte* row_of(const Rows& rows, const Sequence& s, const Row& row) const {
    return rows.at(s.batch_offset, s.q_begin + row.q_idx, row.q_head);
  }

  // ---- before the tiles ----

  void prepare_rows(int worker, std::int64_t index) {
    const RowRange block = block_at(index);
    const BackwardScratch& scratch = scratch_[static_cast<std::size_t>(worker)];
    for (std::int64_t begin = block.begin; begin < block.end; begin += spec_.lanes) {
      RowRange panel = block;
      panel.begin = begin;
      panel.end = std::min(block.end, begin + spec_.lanes);
      prepare_panel(panel, scratch);
    }
    if (!plan_.sums_delta) return;
    RowRange rows = block;
    for (; rows.begin < block.end; rows.begin = rows.end) {
      rows.end = std::min(block.end, rows.begin + spec_.panels * spec_.lanes);
      sum_delta(rows, scratch);
    }
  }

  void prepare_panel(const RowRange& rows, const BackwardScratch& scratch) const {
    bool is_again = false;
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const Row row = row_at(rows, i);
      const std::int64_t id = row_id(rows.sequence, row);
      const float lse = row_value(forward_.lse, rows.sequence, row);
      const double product = plan_.sums_delta ? 0 : product_of(rows.sequence, row);
      memory_.origin[id] = 0;
      memory_.log_sum[id] = lse;
      memory_.delta[id] = static_cast<float>(product - dlse_of(rows.sequence, row));
      is_again |= is_large(lse) || (g_.wants_dsinks && !std::isfinite(product));
      clear_dq_row(rows.sequence, row, id);
    }
    if (is_again) sum_again(rows, scratch);
  }

  static bool is_large(float lse) { return std::isfinite(lse) && std::abs(lse) > kLargeLse; }

  /// dO · O
  double product_of(const Sequence& s, const Row& row) const {
    return gradient_.product({row_of(out_, s, row), out_.dtype, out_.col_stride},
                             {row_of(dout_, s, row), dout_.dtype, dout_.col_stride}, f_.head_dim_v);
  }

  double dlse_of(const Sequence& s, const Row& row) const {
    return args_.dlse ? row_value(args_.dlse, s, row) : 0;
  }

  void clear_dq_row(const Sequence& s, const Row& row, std::int64_t id) const {
    if (!g_.wants_dq() || schedule_.is_side_by_side) return;
    float* to = dq_row(s, row, id, 0);
    for (std::int64_t d = 0; d < f_.head_dim_qk; ++d) to[d * dq_stride()] = 0;
  }

  /// Row maximum and sum of a panel, as the forward pass has them before they become one number. They also tell a row
  /// that sees nothing but its sink: what its out and dO hold is of no effect.
  void sum_again(const RowRange& rows, const BackwardScratch& scratch) const {
    const StepsOf steps(kernels_);
    const BackwardScratch::Panel& memory = scratch.panels.front();
    Panel panel = start_panel(rows, memory, scratch);
    const auto lanes = static_cast<std::size_t>(spec_.lanes);
    // Lanes that the panel will not need again before start_panel fills them.
    const PanelState state{memory.origin, memory.log_sum, memory.delta};
    std::fill_n(state.row_max, lanes, -kInfinity);
    std::fill_n(state.row_sum, lanes, 0.0F);
    const float unit = is_prescaled_ ? 1.0F : f_.softmax_scale;
    Item item{.sequence = rows.sequence, .kv_head = rows.kv_head};
    for (std::int64_t begin = 0; begin < rows.sequence.seqlen_kv; begin += spec_.tile_kv) {
      const std::int64_t end = std::min(begin + spec_.tile_kv, rows.sequence.seqlen_kv);
      const VisiblePart seen = panel.keys.next(begin, end);
      if (seen.range.count == 0) continue;
      item.key_begin = begin;
      const KeyTile keys =
          kernels_.load_keys(tile_of(k_, item, begin, end, f_.head_dim_qk), scratch.key_buffer);
      compute_scores(panel, item, begin, keys, seen, scratch);
      kernels_.softmax(scratch.scores, seen.range.count, panel.num_vectors,
                       unit * std::numbers::log2e_v<float>, state, {});
    }
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const Row row = row_at(rows, i);
      const std::int64_t id = row_id(rows.sequence, row);
      const auto lane = static_cast<std::size_t>(i - rows.begin);
      if (state.row_max[lane] == -kInfinity && state.row_sum[lane] == 0)
        memory_.delta[id] = static_cast<float>(-dlse_of(rows.sequence, row));
      if (!is_large(memory_.log_sum[id]) || !std::isfinite(state.row_max[lane])) continue;
      double sum = state.row_sum[lane];
      if (forward_.sinks)
        sum += std::exp(sink_of(row.q_head) - static_cast<double>(state.row_max[lane]) * unit);
      memory_.origin[id] = state.row_max[lane];
      memory_.log_sum[id] = static_cast<float>(std::log(sum));
    }
  }

  double sink_of(std::int64_t q_head) const {
    return static_cast<const float*>(forward_.sinks.data())[q_head * forward_.sinks.stride(0)];
  }

  // ---- work items ----

  std::int64_t num_chunks(const Sequence& s) const {
    return ceil_div(s.seqlen_kv, chunk_keys(spec_, s.seqlen_kv));
  }

  void compute_task(int worker, std::int64_t task) {
    const BackwardScratch& scratch = scratch_[static_cast<std::size_t>(worker)];
    if (!g_.captured.empty()) captured_.clear_task(task);
    for (std::int64_t group = task; group < schedule_.num_groups; group += schedule_.num_tasks)
      compute_group(group, task, scratch);
  }

  /// The items of a group in order; what does not tell groups apart runs over all its values.
  void compute_group(std::int64_t group, std::int64_t task, const BackwardScratch& scratch) {
    struct Range {
      std::int64_t begin, end;
    };
    const auto take = [&group](bool is_fixed, std::int64_t count) {
      if (!is_fixed) return Range{0, count};
      const std::int64_t index = group % count;
      group /= count;
      return Range{index, index + 1};
    };
    const Range chunks = take(schedule_.by_chunk, schedule_.max_chunks);
    const Range heads = take(schedule_.by_head, f_.num_heads_kv);
    const Range sequences = take(schedule_.by_sequence, f_.num_sequences);
    for (std::int64_t s = sequences.begin; s < sequences.end; ++s) {
      for (std::int64_t head = heads.begin; head < heads.end; ++head) {
        for (std::int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk)
          compute_item(item_at(s, head, chunk), task, scratch);
      }
    }
  }

  Item item_at(std::int64_t sequence_index, std::int64_t kv_head, std::int64_t chunk) const {
    const Sequence s = sequence(sequence_index);
    const std::int64_t keys = chunk_keys(spec_, s.seqlen_kv);
    return {s, kv_head, chunk, std::min(s.seqlen_kv, chunk * keys),
            std::min(s.seqlen_kv, (chunk + 1) * keys)};
  }

  void compute_item(const Item& item, std::int64_t task, const BackwardScratch& scratch) {
    if (item.key_begin == item.key_end) return;
    const StepsOf steps(kernels_);
    const std::int64_t keys =
        ceil_div(item.key_end - item.key_begin, kSubTileKeys) * kSubTileKeys;  // as accumulate_rows
    if (g_.wants_dk()) std::fill_n(scratch.dk, keys * gradient_.row_pitch(f_.head_dim_qk), 0.0F);
    if (g_.wants_dv()) std::fill_n(scratch.dv, keys * gradient_.row_pitch(f_.head_dim_v), 0.0F);
    std::fill_n(scratch.ones, spec_.lanes, 1.0F);
    load_chunk(item, scratch);
    if (schedule_.is_side_by_side) clear_dq_sums(item);
    const std::int64_t rows = num_rows(item.sequence);
    for (std::int64_t begin = 0; begin < rows; begin += spec_.panels * spec_.lanes) {
      const std::int64_t end = std::min(rows, begin + spec_.panels * spec_.lanes);
      walk_chunk(item, {item.sequence, item.kv_head, begin, end}, task, scratch);
    }
    if (g_.wants_dk()) write_keys(item, args_.dk, scratch.dk, f_.head_dim_qk);
    if (g_.wants_dv()) write_keys(item, args_.dv, scratch.dv, f_.head_dim_v);
  }

  TileSource tile_of(const Rows& rows, const Item& item, std::int64_t begin, std::int64_t end,
                     std::int64_t head_dim) const {
    return {
        .data = rows.at(item.sequence.batch_offset, item.sequence.kv_begin + begin, item.kv_head),
        .dtype = rows.dtype,
        .row_stride = rows.row_stride,
        .col_stride = rows.col_stride,
        .num_rows = end - begin,
        .num_cols = head_dim};
  }

  /// Rows that lie apart are copied: with every row on a page of its own, the panels of a chunk would pay for page
  /// walks again and again.
  KeyTile load_rows(const TileSource& source, std::byte* buffer) const {
    const bool lie_apart = kernels_.product == Dtype::f32 && source.dtype == Dtype::f32 &&
                           source.col_stride == 1 && source.row_stride != source.num_cols;
    if (!lie_apart) return kernels_.load_keys(source, buffer);
    const auto row_bytes = static_cast<std::size_t>(source.num_cols) * sizeof(float);
    for (std::int64_t row = 0; row < source.num_rows; ++row) {
      std::memcpy(buffer + static_cast<std::size_t>(row) * row_bytes,
                  source.data + row * source.row_stride * static_cast<std::int64_t>(sizeof(float)),
                  row_bytes);
    }
    return {buffer, source.num_cols, source.num_rows};
  }

  void load_chunk(const Item& item, const BackwardScratch& scratch) const {
    const std::size_t key_bytes = kernels_.key_bytes(spec_.tile_kv, f_.head_dim_qk);
    const std::size_t value_bytes = kernels_.key_bytes(spec_.tile_kv, f_.head_dim_v);
    const std::size_t column_bytes = kernels_.value_bytes(spec_.tile_kv, f_.head_dim_qk);
    std::size_t tile = 0;
    for (std::int64_t begin = item.key_begin; begin < item.key_end; begin += spec_.tile_kv) {
      const std::int64_t end = std::min(begin + spec_.tile_kv, item.key_end);
      const TileSource keys = tile_of(k_, item, begin, end, f_.head_dim_qk);
      const TileSource values = tile_of(v_, item, begin, end, f_.head_dim_v);
      scratch.keys[tile] = load_rows(keys, scratch.key_buffer + tile * key_bytes);
      scratch.values[tile] = load_rows(values, scratch.value_buffer + tile * value_bytes);
      if (g_.wants_dq())
        kernels_.load_values(keys, /*is_careful=*/true, scratch.key_columns + tile * column_bytes);
      ++tile;
    }
  }

  void write_keys(const Item& item, const TensorView& view, const float* sums,
                  std::int64_t head_dim) const {
    const Rows to(view);
    const std::int64_t pitch = gradient_.row_pitch(head_dim);
    for (std::int64_t key = item.key_begin; key < item.key_end; ++key) {
      kernels_.store_row(
          sums + (key - item.key_begin) * pitch, 1.0F, head_dim, to.dtype, to.col_stride,
          to.at(item.sequence.batch_offset, item.sequence.kv_begin + key, item.kv_head));
    }
  }

  // ---- sums of dq ----

  std::int64_t dq_stride() const {
    return memory_.dq_sums == nullptr ? args_.dq.stride(args_.dq.rank() - 1) : 1;
  }

  float* dq_row(const Sequence& s, const Row& row, std::int64_t id, std::int64_t chunk) const {
    if (memory_.dq_sums == nullptr) {
      return reinterpret_cast<float*>(
          Rows(args_.dq).at(s.batch_offset, s.q_begin + row.q_idx, row.q_head));
    }
    const std::int64_t copy = schedule_.is_side_by_side ? chunk : 0;
    return memory_.dq_sums + (copy * f_.total_q * f_.num_heads_q + id) * f_.head_dim_qk;
  }

  void clear_dq_sums(const Item& item) const {
    if (!g_.wants_dq()) return;
    const RowRange rows{item.sequence, item.kv_head, 0, num_rows(item.sequence)};
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const Row row = row_at(rows, i);
      std::fill_n(dq_row(item.sequence, row, row_id(item.sequence, row), item.chunk),
                  f_.head_dim_qk, 0.0F);
    }
  }

  void write_dq(int /*worker*/, std::int64_t index) {
    const RowRange rows = block_at(index);
    const Rows to(args_.dq);
    const std::int64_t chunks = schedule_.is_side_by_side ? num_chunks(rows.sequence) : 1;
    std::vector<float> sum(static_cast<std::size_t>(f_.head_dim_qk));
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const Row row = row_at(rows, i);
      const std::int64_t id = row_id(rows.sequence, row);
      std::ranges::fill(sum, 0.0F);
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float* part = dq_row(rows.sequence, row, id, chunk);
        for (std::size_t d = 0; d < sum.size(); ++d) sum[d] += part[d];
      }
      kernels_.store_row(
          sum.data(), 1.0F, f_.head_dim_qk, to.dtype, to.col_stride,
          to.at(rows.sequence.batch_offset, rows.sequence.q_begin + row.q_idx, row.q_head));
    }
  }

  // ---- panels and tiles ----

  struct Panel {
    const BackwardScratch::Panel* memory = nullptr;
    std::int64_t num_rows = 0;
    int num_vectors = 0;
    bool is_dout_finite = true;
    bool saw_keys = false;
    VisibleKeys keys{};
  };

  /// Positions, Qᵀ and what the panel sees.
  Panel start_panel(const RowRange& rows, const BackwardScratch::Panel& memory,
                    const BackwardScratch& scratch) const {
    const std::int64_t count = rows.end - rows.begin;
    for (std::int64_t lane = 0; lane < spec_.lanes; ++lane) {
      // Padding lanes repeat the last row, so that programs read what exists.
      const Row row = row_at(rows, rows.begin + std::min(lane, count - 1));
      memory.q_idx[lane] = static_cast<std::int32_t>(row.q_idx);
      memory.q_head[lane] = static_cast<std::int32_t>(row.q_head);
      scratch.rows[lane] = lane < count ? row_of(q_, rows.sequence, row) : nullptr;
    }
    Panel panel{.memory = &memory,
                .num_rows = count,
                .num_vectors = static_cast<int>(ceil_div(count, kernels_.vector_lanes))};
    kernels_.pack_queries(scratch.rows, q_.dtype, q_.col_stride, f_.head_dim_qk, memory.queries);
    mapper_->row(tile_row(rows.sequence, rows.kv_head, memory.q_idx, memory.q_head, count),
                 panel.keys.runs);
    return panel;
  }

  /// What is known of the rows, and dOᵀ.
  void load_douts(const Panel& panel, const Sequence& s) const {
    const BackwardScratch::Panel& memory = *panel.memory;
    for (std::int64_t lane = 0; lane < spec_.lanes; ++lane) {
      const bool is_row = lane < panel.num_rows;
      const Row row{memory.q_idx[lane], memory.q_head[lane]};
      const std::int64_t id = row_id(s, row);
      memory.origin[lane] = is_row ? memory_.origin[id] : 0;
      memory.log_sum[lane] = is_row ? memory_.log_sum[id] : -kInfinity;
      memory.delta[lane] = is_row ? memory_.delta[id] : 0;
      memory.dout_source[lane] = is_row ? row_of(dout_, s, row) : nullptr;
    }
    kernels_.pack_queries(memory.dout_source, dout_.dtype, dout_.col_stride, f_.head_dim_v,
                          memory.douts);
  }

  /// Everything else that gradients read of the rows.
  void load_gradients(Panel& panel, const RowRange& rows, std::int64_t chunk,
                      const BackwardScratch& scratch) const {
    const BackwardScratch::Panel& memory = *panel.memory;
    gradient_.pack_rows(scratch.rows, panel.num_rows, q_.dtype, q_.col_stride, f_.head_dim_qk,
                        memory.query_rows);
    load_douts(panel, rows.sequence);
    for (std::int64_t lane = 0; g_.wants_dq() && lane < panel.num_rows; ++lane) {
      const Row row{memory.q_idx[lane], memory.q_head[lane]};
      memory.dq_rows[lane] = dq_row(rows.sequence, row, row_id(rows.sequence, row), chunk);
    }
    panel.is_dout_finite = gradient_.pack_rows(memory.dout_source, panel.num_rows, dout_.dtype,
                                               dout_.col_stride, f_.head_dim_v, memory.dout_rows);
    if (g_.wants_dq())
      std::fill_n(memory.dq, kernels_.output_bytes(f_.head_dim_qk) / sizeof(float), 0.0F);
  }

  void walk_chunk(const Item& item, const RowRange& rows, std::int64_t task,
                  const BackwardScratch& scratch) {
    std::vector<Panel> panels;
    panels.reserve(static_cast<std::size_t>(spec_.panels));
    for (std::int64_t begin = rows.begin; begin < rows.end; begin += spec_.lanes) {
      RowRange panel_rows = rows;
      panel_rows.begin = begin;
      panel_rows.end = std::min(rows.end, begin + spec_.lanes);
      Panel panel = start_panel(panel_rows, scratch.panels[panels.size()], scratch);
      if (!sees_chunk(panel.keys, item)) continue;
      load_gradients(panel, panel_rows, item.chunk, scratch);
      panels.push_back(std::move(panel));
    }
    std::size_t tile = 0;
    for (std::int64_t begin = item.key_begin; begin < item.key_end;
         begin += spec_.tile_kv, ++tile) {
      const std::int64_t end = std::min(begin + spec_.tile_kv, item.key_end);
      for (Panel& panel : panels) {
        const VisiblePart seen = panel.keys.next(begin, end);
        if (seen.range.count > 0) step(panel, item, begin, tile, seen, task, scratch);
      }
    }
    if (!g_.wants_dq()) return;
    for (const Panel& panel : panels) {
      gradient_.add_queries(panel.memory->dq, panel.num_rows, f_.head_dim_qk, panel.memory->dq_rows,
                            dq_stride());
    }
  }

  static bool sees_chunk(const VisibleKeys& keys, const Item& item) {
    return std::ranges::any_of(keys.runs, [&](const mask::TileRun& run) {
      return run.begin * kSubTileKeys < item.key_end && run.end * kSubTileKeys > item.key_begin;
    });
  }

  /// One tile for one panel.
  void step(const Panel& panel, const Item& item, std::int64_t begin, std::size_t tile,
            const VisiblePart& seen, std::int64_t task, const BackwardScratch& scratch) {
    const BackwardScratch::Panel& memory = *panel.memory;
    const std::int64_t count = seen.range.count;
    const auto tile_floats = static_cast<std::size_t>(count * spec_.lanes);
    NextTile next;
    compute_scores(panel, item, begin, scratch.keys[tile], seen, scratch);
    if (!panel.is_dout_finite)
      std::memcpy(scratch.seen, scratch.scores, tile_floats * sizeof(float));
    if (wants_score_gradients_) {
      kernels_.scores(memory.douts, scratch.values[tile], seen.range, f_.head_dim_v,
                      panel.num_vectors, scratch.products, next);
    }
    const SoftmaxGradient gradients = softmax_step(panel, item, begin, seen, scratch);
    gradient_.softmax_gradient(gradients);
    const std::int64_t first_key = begin - item.key_begin + seen.range.begin;
    float* const dv =
        g_.wants_dv() ? scratch.dv + first_key * gradient_.row_pitch(f_.head_dim_v) : nullptr;
    if (gradients.is_read_between) {
      if (g_.wants_dv() && !panel.is_dout_finite) add_non_finite(panel, count, dv, scratch);
      if (wants_score_gradients_) through_program(panel, item, begin, seen, task, scratch);
      if (gradient_.pack_gradients != nullptr) gradient_.pack_gradients(gradients);
    }
    if (g_.wants_dv()) {
      gradient_.accumulate_rows(scratch.scores, count, panel.num_rows, memory.dout_rows,
                                f_.head_dim_v, dv);
    }
    if (!wants_score_gradients_) return;
    if (g_.wants_dk()) {
      gradient_.accumulate_rows(scratch.products, count, panel.num_rows, memory.query_rows,
                                f_.head_dim_qk,
                                scratch.dk + first_key * gradient_.row_pitch(f_.head_dim_qk));
    }
    if (g_.wants_dq()) {
      kernels_.accumulate(
          scratch.key_columns + tile * kernels_.value_bytes(spec_.tile_kv, f_.head_dim_qk),
          scratch.keys[tile].num_keys, seen.range, scratch.products, f_.head_dim_qk,
          panel.num_vectors, scratch.ones, memory.dq, next);
    }
  }

  ProgramTile program_tile(const Panel& panel, const Item& item, std::int64_t begin,
                           const VisiblePart& seen, const BackwardScratch& scratch) const {
    return {.scores = scratch.scores,
            .num_keys = seen.range.count,
            .lanes = static_cast<int>(spec_.lanes),
            .kv_begin = begin + seen.range.begin,
            .q_idx = panel.memory->q_idx,
            .q_head = panel.memory->q_head,
            .batch = static_cast<std::int32_t>(item.sequence.index),
            .kv_head = static_cast<std::int32_t>(item.kv_head),
            .seqlen_q = static_cast<std::int32_t>(item.sequence.seqlen_q),
            .seqlen_kv = static_cast<std::int32_t>(item.sequence.seqlen_kv),
            .scratch = scratch.program};
  }

  /// S = mask(program(scale · K Qᵀ)), as in the forward pass; without a program the scale is left to the softmax.
  void compute_scores(const Panel& panel, const Item& item, std::int64_t begin, const KeyTile& keys,
                      const VisiblePart& seen, const BackwardScratch& scratch) const {
    NextTile next;
    const std::int64_t count = seen.range.count;
    kernels_.scores(panel.memory->queries, keys, seen.range, f_.head_dim_qk, panel.num_vectors,
                    scratch.scores, next);
    if (is_prescaled_) kernels_.scale(scratch.scores, count, f_.softmax_scale);
    ProgramTile program = program_tile(panel, item, begin, seen, scratch);
    if (plan_.reads_score) {
      std::memcpy(scratch.raw_scores, scratch.scores,
                  static_cast<std::size_t>(count * spec_.lanes) * sizeof(float));
    }
    if (!plan_.score.empty()) {
      program.tensors = score_bindings_.tensors.data();
      program.scalars = score_bindings_.scalars.data();
      kernels_.run_score(plan_.score.tape, program);
    }
    program.tensors = mask_bindings_.tensors.data();
    program.scalars = mask_bindings_.scalars.data();
    for (int i = 0; i < seen.num_partial; ++i) {
      const KeyRange part = seen.partial[static_cast<std::size_t>(i)];
      program.scores = scratch.scores + (part.begin - seen.range.begin) * spec_.lanes;
      program.num_keys = part.count;
      program.kv_begin = begin + part.begin;
      kernels_.run_mask(plan_.mask.tape, program);
    }
  }

  SoftmaxGradient softmax_step(const Panel& panel, const Item& item, std::int64_t begin,
                               const VisiblePart& seen, const BackwardScratch& scratch) const {
    SoftmaxGradient step{.scores = scratch.scores,
                         .products = wants_score_gradients_ ? scratch.products : nullptr,
                         .is_read_between = is_chained() || !panel.is_dout_finite,
                         .num_keys = seen.range.count,
                         .lanes = spec_.lanes,
                         .num_vectors = panel.num_vectors,
                         .scale = is_prescaled_ ? 1.0F : f_.softmax_scale,
                         .factor = is_chained() ? 1.0F : f_.softmax_scale,
                         .origin = panel.memory->origin,
                         .log_sum = panel.memory->log_sum,
                         .delta = panel.memory->delta,
                         .dropout = dropout_};
    step.dropout.batch = static_cast<std::uint32_t>(item.sequence.index);
    step.dropout.kv_begin = begin + seen.range.begin;
    step.dropout.q_idx = panel.memory->q_idx;
    step.dropout.q_head = panel.memory->q_head;
    return step;
  }

  /// Are gradients by the final score wanted first, and multiplied by derivative and scale after?
  bool is_chained() const { return !plan_.derivative.empty() || !g_.captured.empty(); }

  /// From gradients by the final score to gradients by q · k, and to those of what the program captures.
  void through_program(const Panel& panel, const Item& item, std::int64_t begin,
                       const VisiblePart& seen, std::int64_t task, const BackwardScratch& scratch) {
    if (!is_chained()) return;
    const std::int64_t count = seen.range.count * spec_.lanes;
    ProgramTile program = program_tile(panel, item, begin, seen, scratch);
    if (!plan_.captured.empty()) {
      program.scores = scratch.raw_scores;
      captured_.add(task,
                    {.program = program,
                     .gradients = scratch.products,
                     .num_rows = panel.num_rows,
                     .values = scratch.derivative,
                     .offsets = scratch.offsets},
                    kernels_, gradient_);
    }
    if (plan_.derivative.empty()) {
      kernels_.scale(scratch.products, seen.range.count, f_.softmax_scale);
      return;
    }
    if (plan_.reads_score) {
      std::memcpy(scratch.derivative, scratch.raw_scores,
                  static_cast<std::size_t>(count) * sizeof(float));
    }
    program.scores = scratch.derivative;
    program.tensors = derivative_bindings_.tensors.data();
    program.scalars = derivative_bindings_.scalars.data();
    kernels_.run_score(plan_.derivative.tape, program);
    gradient_.chain(scratch.products, scratch.derivative, count, f_.softmax_scale,
                    scratch.products);
  }

  /// Elements of dO that are not finite, to the keys that their rows see.
  void add_non_finite(const Panel& panel, std::int64_t num_keys, float* dv,
                      const BackwardScratch& scratch) const {
    const std::int64_t pitch = gradient_.row_pitch(f_.head_dim_v);
    for (std::int64_t lane = 0; lane < panel.num_rows; ++lane) {
      if (panel.memory->log_sum[lane] == -kInfinity) continue;
      for (std::int64_t d = 0; d < f_.head_dim_v; ++d) {
        const float x =
            load_scalar(panel.memory->dout_source[lane], dout_.dtype, d * dout_.col_stride);
        if (std::isfinite(x)) continue;
        for (std::int64_t key = 0; key < num_keys; ++key) {
          const std::int64_t at = key * spec_.lanes + lane;
          if (scratch.seen[at] != -kInfinity) dv[key * pitch + d] += scratch.scores[at] * x;
        }
      }
    }
  }

  // ---- delta of the numbers that dS is made of ----

  struct RowSums {
    std::array<double, kMaxLanes> weights{};   // Σ P
    std::array<double, kMaxLanes> products{};  // Σ P dP
  };

  /// Of a few panels together, so that K and V are converted once.
  void sum_delta(const RowRange& rows, const BackwardScratch& scratch) const {
    const StepsOf steps(kernels_);
    std::vector<Panel> panels;
    std::vector<RowSums> sums(static_cast<std::size_t>(spec_.panels));
    for (RowRange part = rows; part.begin < rows.end; part.begin = part.end) {
      part.end = std::min(rows.end, part.begin + spec_.lanes);
      panels.push_back(start_panel(part, scratch.panels[panels.size()], scratch));
      load_douts(panels.back(), rows.sequence);
      std::fill_n(panels.back().memory->delta, spec_.lanes, 0.0F);
    }
    Item item{.sequence = rows.sequence, .kv_head = rows.kv_head};
    for (std::int64_t begin = 0; begin < rows.sequence.seqlen_kv; begin += spec_.tile_kv) {
      item.key_begin = begin;
      item.key_end = std::min(begin + spec_.tile_kv, rows.sequence.seqlen_kv);
      sum_tile(item, panels, sums, scratch);
    }
    for (std::size_t i = 0; i < panels.size(); ++i) set_delta(panels[i], rows.sequence, sums[i]);
  }

  void sum_tile(const Item& item, std::vector<Panel>& panels, std::vector<RowSums>& sums,
                const BackwardScratch& scratch) const {
    KeyTile keys, values;
    for (std::size_t i = 0; i < panels.size(); ++i) {
      const VisiblePart seen = panels[i].keys.next(item.key_begin, item.key_end);
      if (seen.range.count == 0) continue;
      if (keys.data == nullptr) {
        keys = load_rows(tile_of(k_, item, item.key_begin, item.key_end, f_.head_dim_qk),
                         scratch.key_buffer);
        values = load_rows(tile_of(v_, item, item.key_begin, item.key_end, f_.head_dim_v),
                           scratch.value_buffer);
      }
      NextTile next;
      compute_scores(panels[i], item, item.key_begin, keys, seen, scratch);
      kernels_.scores(panels[i].memory->douts, values, seen.range, f_.head_dim_v,
                      panels[i].num_vectors, scratch.products, next);
      add_row_sums(panels[i], item, seen, scratch, sums[i]);
    }
  }

  /// P before dropout: softmax_gradient leaves it after.
  void add_row_sums(const Panel& panel, const Item& item, const VisiblePart& seen,
                    const BackwardScratch& scratch, RowSums& sums) const {
    SoftmaxGradient step = softmax_step(panel, item, item.key_begin, seen, scratch);
    step.products = scratch.products;
    step.is_read_between = true;
    step.factor = 1;
    const std::int64_t count = seen.range.count * spec_.lanes;
    const bool drops = step.dropout.threshold > 0;
    if (drops) std::copy_n(scratch.scores, count, scratch.derivative);
    gradient_.softmax_gradient(step);
    if (drops) {
      std::copy_n(scratch.derivative, count, scratch.scores);
      step.products = nullptr;
      step.dropout.threshold = 0;
      gradient_.softmax_gradient(step);
    }
    add_keys(scratch.scores, seen.range.count, panel.num_rows, sums.weights);
    add_keys(scratch.products, seen.range.count, panel.num_rows, sums.products);
  }

  /// Sums over keys: fp32 of a few, fp64 of these.
  void add_keys(const float* values, std::int64_t num_keys, std::int64_t num_rows,
                std::array<double, kMaxLanes>& sums) const {
    constexpr std::int64_t kKeysAtOnce = 8;
    for (std::int64_t begin = 0; begin < num_keys; begin += kKeysAtOnce) {
      std::array<float, kMaxLanes> part{};
      const std::int64_t end = std::min(begin + kKeysAtOnce, num_keys);
      for (std::int64_t key = begin; key < end; ++key) {
        const float* row = values + key * spec_.lanes;
        for (std::int64_t lane = 0; lane < num_rows; ++lane)
          part[static_cast<std::size_t>(lane)] += row[lane];
      }
      for (std::size_t lane = 0; lane < static_cast<std::size_t>(num_rows); ++lane)
        sums[lane] += part[lane];
    }
  }

  /// Without a sink Σ P is 1: dividing by what it came to, rows of dS sum to -dlse whatever the error of lse.
  void set_delta(const Panel& panel, const Sequence& s, const RowSums& sums) const {
    for (std::int64_t lane = 0; lane < panel.num_rows; ++lane) {
      const Row row{panel.memory->q_idx[lane], panel.memory->q_head[lane]};
      const double weight = sums.weights[static_cast<std::size_t>(lane)];
      double delta = sums.products[static_cast<std::size_t>(lane)];
      if (!forward_.sinks && weight != 0) delta /= weight;
      memory_.delta[row_id(s, row)] = static_cast<float>(delta - dlse_of(s, row));
    }
  }

  // ---- after the tiles ----

  /// -Σ exp(sink - lse) delta over all rows of a head, in order.
  void write_dsink(int /*worker*/, std::int64_t q_head) {
    const double sink = sink_of(q_head);
    double sum = 0;
    for (std::int64_t i = 0; i < f_.num_sequences; ++i) {
      const Sequence s = sequence(i);
      for (std::int64_t q_idx = 0; q_idx < s.seqlen_q; ++q_idx) {
        const Row row{q_idx, q_head};
        const double lse = row_value(forward_.lse, s, row);
        if (lse == -kInfinity) continue;
        sum -= sink_share(sink, lse) * memory_.delta[row_id(s, row)];
      }
    }
    static_cast<float*>(args_.dsinks.mutable_data())[q_head * args_.dsinks.stride(0)] =
        static_cast<float>(sum);
  }

  void clear_captured(int /*worker*/, std::int64_t block) { captured_.clear_block(block); }
  void write_captured(int /*worker*/, std::int64_t block) { captured_.finish_block(block); }

  /// Packed rows behind the last sequence belong to nobody: gradient 0.
  void clear_padding_rows() const {
    if (!f_.is_varlen) return;
    const std::int64_t end_q = cu_seqlen(forward_.cu_seqlens_q, f_.num_sequences);
    const std::int64_t end_kv = cu_seqlen(forward_.cu_seqlens_kv, f_.num_sequences);
    clear_rows(args_.dq, end_q, f_.head_dim_qk);
    clear_rows(args_.dk, end_kv, f_.head_dim_qk);
    clear_rows(args_.dv, end_kv, f_.head_dim_v);
  }

  void clear_rows(const TensorView& view, std::int64_t begin, std::int64_t head_dim) const {
    if (!view) return;
    const Rows rows(view);
    const std::vector<float> zeros(static_cast<std::size_t>(head_dim), 0.0F);
    for (std::int64_t row = begin; row < view.size(0); ++row) {
      for (std::int64_t head = 0; head < view.size(1); ++head) {
        kernels_.store_row(zeros.data(), 1.0F, head_dim, rows.dtype, rows.col_stride,
                           rows.at(0, row, head));
      }
    }
  }

  const GradientProblem& g_;
  const ForwardProblem& f_;
  const BackwardPlan& plan_;
  const BackwardSpec& spec_;
  const BackwardSchedule& schedule_;
  const AttentionBackward& args_;
  const AttentionForward& forward_;
  const PanelKernels& kernels_;
  const GradientKernels& gradient_;
  Executor& executor_;
  const Rows q_, k_, v_, out_, dout_;
  const Bindings score_bindings_, mask_bindings_, derivative_bindings_;
  Carver carver_;
  const BackwardMemory memory_;
  CapturedSums captured_;
  std::vector<BackwardScratch> scratch_;
  std::optional<mask::BlockMapper> own_mapper_;
  const mask::BlockMapper* mapper_ = nullptr;
  bool is_prescaled_ = false, wants_score_gradients_ = true;
  const PanelDropout dropout_;
};

}  // namespace

void attention_backward(const GradientProblem& problem, const BackwardPlan& plan,
                        const AttentionBackward& args, std::byte* workspace, Executor& executor) {
  BackwardRun(problem, plan, args, workspace, executor).run();
}

}  // namespace fovea::cpu
