#include "cpu/forward/few_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#include "core/scalar_io.hpp"
#include "cpu/row_state.hpp"
#include "cpu/visible_keys.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t kLeastBlock = 32;  // keys: a call for 16 costs a fifth of them
// A page of more rows is long enough a piece of one head.
constexpr std::int64_t kSmallPage = 64;

using RowSet = std::uint32_t;  // a bit for each row

class FewRowsWalk {
 public:
  FewRowsWalk(const ForwardCall& call, const ForwardItem& item, const ForwardScratch& scratch)
      : call_(call),
        kernels_(call.plain_kernels),
        problem_(call.problem),
        item_(item),
        scratch_(scratch),
        few_(scratch.few),
        cached_(scratch.cached),
        tile_kv_(call.spec.tile_kv),
        lanes_(call.spec.lanes),
        num_rows_(static_cast<int>(problem_.group * item.sequence.seqlen_q)),
        block_keys_(keys_of_a_block()) {}

  void run(const EmitState& emit) {
    start_heads(item_.kv_head, item_.kv_head + item_.num_heads);
    walk_tiles();
    std::vector<std::pair<std::int64_t, RowSet>> redo;
    for (const Head& head : heads_) {
      const RowSet broken = non_finite_rows(head);
      emit_rows(head, ~broken, emit);
      if (broken != 0) redo.emplace_back(head.index, broken);
    }
    is_careful_ = true;
    for (const auto& [head, broken] : redo) {
      start_heads(head, head + 1);
      walk_tiles();
      add_extra(heads_.front());
      emit_rows(heads_.front(), broken, emit);
    }
  }

 private:
  struct Head {
    std::int64_t index = 0;  // of k and v
    RowBlock queries{}, scores{}, sums{}, extra{};
    PanelState state{};
    const std::int32_t* q_idx = nullptr;   // [lanes]
    const std::int32_t* q_head = nullptr;  // [lanes]
    std::vector<mask::Span> seen_keys{};   // [num_rows] where masks are one band
    VisibleKeys visible{};
    VisiblePart seen{};  // of the current tile
  };

  /// As much memory whatever the number of heads; pages are read whole.
  std::int64_t keys_of_a_block() const {
    if (item_.num_heads == 1) return tile_kv_;
    const std::int64_t page = call_.k.page_size();
    if (page >= kLeastBlock) return std::min(page, tile_kv_);
    return std::max(kLeastBlock, tile_kv_ / item_.num_heads);
  }

  // ---- heads ----

  void start_heads(std::int64_t begin, std::int64_t end) {
    heads_.clear();
    heads_.resize(static_cast<std::size_t>(end - begin));
    for (std::int64_t head = begin; head < end; ++head)
      start(heads_[static_cast<std::size_t>(head - begin)], head, head - begin);
  }

  void start(Head& head, std::int64_t index, std::int64_t place) {
    head.index = index;
    const auto block = [&](float* data, std::int64_t pitch) {
      return RowBlock{data + place * kFewRows * pitch, pitch};
    };
    head.queries = block(few_.queries, padded(problem_.head_dim_qk));
    head.scores = block(few_.scores, tile_kv_);
    head.sums = block(few_.sums, padded(problem_.head_dim_v));
    head.extra = {few_.extra, padded(problem_.head_dim_v)};
    const std::int64_t lane = place * lanes_;
    head.state = {few_.row_max + lane, few_.row_sum + lane, few_.rescale + lane,
                  few_.origin + lane};
    head.q_idx = few_.q_idx + lane;
    head.q_head = few_.q_head + lane;
    std::fill_n(head.state.row_max, lanes_, -kInfinity);
    std::fill_n(head.state.origin, lanes_, -kInfinity);
    std::fill_n(head.state.row_sum, lanes_, 0.0F);
    std::fill_n(head.sums.data, num_rows_ * head.sums.pitch, 0.0F);
    if (is_careful_) std::fill_n(head.extra.data, num_rows_ * head.extra.pitch, 0.0F);
    start_rows(head, few_.q_idx + lane, few_.q_head + lane);
    head.visible.unit = call_.spec.map_keys;
    const auto edges = call_.mapper().row(
        tile_row(item_.sequence, index, head.q_idx, head.q_head, num_rows_), head.visible.runs);
    if (!edges) return;
    for (int row = 0; row < num_rows_; ++row)
      head.seen_keys.push_back(edges->keys_of(head.q_idx[row]));
  }

  void start_rows(const Head& head, std::int32_t* q_idx, std::int32_t* q_head) const {
    const Sequence& s = item_.sequence;
    for (std::int64_t lane = 0; lane < lanes_; ++lane) {
      // Padding lanes repeat the last row, so that programs read what exists.
      const std::int64_t row = std::min<std::int64_t>(lane, num_rows_ - 1);
      q_idx[lane] = static_cast<std::int32_t>(row % s.seqlen_q);
      q_head[lane] = static_cast<std::int32_t>(head.index * problem_.group + row / s.seqlen_q);
    }
    for (int row = 0; row < num_rows_; ++row) {
      const std::byte* from = call_.q.at(s.batch_offset, s.q_begin + q_idx[row], q_head[row]);
      float* to = head.queries.row(row);
      for (std::int64_t d = 0; d < problem_.head_dim_qk; ++d)
        to[d] = load_scalar(from, call_.q.dtype, d * call_.q.col_stride);
    }
  }

  // ---- tiles ----

  void walk_tiles() {
    for (std::int64_t tile = item_.tile_begin; tile < item_.tile_end; ++tile) {
      const std::int64_t begin = tile * tile_kv_;
      bool is_seen = false;
      for (Head& head : heads_) {
        head.seen = head.visible.next(begin, begin + keys_of_tile(tile));
        is_seen |= head.seen.range.count > 0;
      }
      if (!is_seen) continue;
      multiply_keys(tile);
      for (const Head& head : heads_) {
        if (head.seen.range.count > 0) finish_scores(head, tile);
      }
      add_values(tile);
    }
  }

  std::int64_t keys_of_tile(std::int64_t tile) const {
    return std::min(tile_kv_, item_.sequence.seqlen_kv - tile * tile_kv_);
  }

  /// Keys [begin, begin + count) of a tile.
  TileSource rows_of(const KeySource& source, const Head& head, std::int64_t tile, KeyRange range,
                     const RowList& list) const {
    const bool is_key = &source == &call_.k;
    return source.tile(item_.sequence, head.index, tile * tile_kv_ + range.begin, range.count,
                       is_key ? problem_.head_dim_qk : problem_.head_dim_v, list);
  }

  /// What the head sees of the block that begins at `begin`.
  KeyRange seen_of_block(const Head& head, std::int64_t begin) const {
    const KeyRange& range = head.seen.range;
    const std::int64_t from = std::max(begin, range.begin);
    const std::int64_t to = std::min(begin + block_keys_, range.begin + range.count);
    return {from, std::max<std::int64_t>(0, to - from)};
  }

  /// The same head's rows of the block after this one, to be fetched in `num_calls` parts. Behind a tile's keys are its
  /// values, behind these the keys of the next tile.
  NextTile rows_after(const KeySource& source, const Head& head, std::int64_t tile,
                      std::int64_t block_begin, std::int64_t num_calls) const {
    std::int64_t begin = block_begin + block_keys_;
    const KeySource* from = &source;
    if (begin >= keys_of_tile(tile)) {
      begin = 0;
      from = &source == &call_.k ? &call_.v : &call_.k;
      if (from == &call_.k && ++tile == item_.tile_end) return {};
    }
    const KeyRange range{begin, std::min(block_keys_, keys_of_tile(tile) - begin)};
    return {rows_of(*from, head, tile, range, cached_.next_key_rows), {}, num_calls};
  }

  void multiply_keys(std::int64_t tile) const {
    for (std::int64_t begin = 0; begin < keys_of_tile(tile); begin += block_keys_) {
      for (const Head& head : heads_) {
        const KeyRange range = seen_of_block(head, begin);
        if (range.count == 0) continue;
        NextTile next = rows_after(call_.k, head, tile, begin, ceil_div(range.count, kFewKeys));
        kernels_.scores_few(head.queries, num_rows_,
                            rows_of(call_.k, head, tile, range, cached_.key_rows),
                            head.scores.part(0, range.begin - head.seen.range.begin), next);
      }
    }
  }

  void add_values(std::int64_t tile) const {
    for (std::int64_t begin = 0; begin < keys_of_tile(tile); begin += block_keys_) {
      for (const Head& head : heads_) {
        const KeyRange range = seen_of_block(head, begin);
        if (range.count == 0) continue;
        NextTile next = rows_after(call_.v, head, tile, begin, ceil_div(range.count, kFewKeys));
        kernels_.accumulate_few(
            rows_of(call_.v, head, tile, range, cached_.value_rows), is_careful_,
            head.scores.part(0, range.begin - head.seen.range.begin), num_rows_, head.sums, next);
      }
    }
  }

  // ---- between the products ----

  /// Scores of a whole tile become probabilities.
  void finish_scores(const Head& head, std::int64_t tile) const {
    apply_programs(head, tile);
    if (is_careful_) collect_non_finite(head, tile);
    const float scale_log2 = call_.unit * std::numbers::log2e_v<float>;
    const std::int64_t num_keys = head.seen.range.count;
    if (call_.dropout.threshold > 0) {
      to_panel(head);
      const auto vectors = static_cast<int>(ceil_div(num_rows_, kernels_.vector_lanes));
      kernels_.softmax(scratch_.scores, num_keys, vectors, scale_log2, head.state,
                       dropout_of(head, tile));
      from_panel(head);
    } else {
      kernels_.softmax_few(head.scores, num_rows_, num_keys, scale_log2, head.state);
    }
    for (int row = 0; row < num_rows_; ++row) {
      const float factor = head.state.rescale[row];
      if (factor == 1) continue;
      for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) head.sums.row(row)[d] *= factor;
    }
  }

  PanelDropout dropout_of(const Head& head, std::int64_t tile) const {
    PanelDropout dropout = call_.dropout;
    dropout.batch = static_cast<std::uint32_t>(item_.sequence.index);
    dropout.kv_begin = tile * tile_kv_ + head.seen.range.begin;
    dropout.q_idx = head.q_idx;
    dropout.q_head = head.q_head;
    return dropout;
  }

  /// Scale, score program and mask. Programs want a panel.
  void apply_programs(const Head& head, std::int64_t tile) const {
    if (call_.is_prescaled) {
      for (int row = 0; row < num_rows_; ++row) {
        float* scores = head.scores.row(row);
        for (std::int64_t i = 0; i < head.seen.range.count; ++i)
          scores[i] *= problem_.softmax_scale;
      }
    }
    const bool masks_by_program = head.seen.num_partial > 0 && head.seen_keys.empty();
    if (!call_.plan.score.empty() || masks_by_program) {
      to_panel(head);
      run_programs(head, tile, masks_by_program);
      from_panel(head);
    }
    if (!masks_by_program) hide(head, tile);
  }

  void run_programs(const Head& head, std::int64_t tile, bool masks_too) const {
    const KeyRange range = head.seen.range;
    const std::int64_t kv_begin = tile * tile_kv_ + range.begin;
    ProgramTile program{.scores = scratch_.scores,
                        .num_keys = range.count,
                        .lanes = static_cast<int>(lanes_),
                        .kv_begin = kv_begin,
                        .q_idx = head.q_idx,
                        .q_head = head.q_head,
                        .batch = static_cast<std::int32_t>(item_.sequence.index),
                        .kv_head = static_cast<std::int32_t>(head.index),
                        .seqlen_q = static_cast<std::int32_t>(item_.sequence.seqlen_q),
                        .seqlen_kv = static_cast<std::int32_t>(item_.sequence.seqlen_kv),
                        .tensors = call_.score_bindings.tensors.data(),
                        .scalars = call_.score_bindings.scalars.data(),
                        .scratch = scratch_.program};
    if (!call_.plan.score.empty()) kernels_.run_score(call_.plan.score.tape, program);
    if (!masks_too) return;
    program.tensors = call_.mask_bindings.tensors.data();
    program.scalars = call_.mask_bindings.scalars.data();
    for (int i = 0; i < head.seen.num_partial; ++i) {
      const KeyRange part = head.seen.partial[static_cast<std::size_t>(i)];
      program.scores = scratch_.scores + (part.begin - range.begin) * lanes_;
      program.num_keys = part.count;
      program.kv_begin = kv_begin + part.begin - range.begin;
      kernels_.run_mask(call_.plan.mask.tape, program);
    }
  }

  /// What lies outside of the one band that each row sees.
  void hide(const Head& head, std::int64_t tile) const {
    for (int i = 0; i < head.seen.num_partial; ++i) {
      const KeyRange part = head.seen.partial[static_cast<std::size_t>(i)];
      for (int row = 0; row < num_rows_; ++row) {
        const mask::Span& seen = head.seen_keys[static_cast<std::size_t>(row)];
        float* scores = head.scores.row(row) - head.seen.range.begin;
        for (std::int64_t key = part.begin; key < part.begin + part.count; ++key) {
          const std::int64_t kv_idx = tile * tile_kv_ + key;
          if (kv_idx < seen.begin || kv_idx >= seen.end) scores[key] = -kInfinity;
        }
      }
    }
  }

  void to_panel(const Head& head) const {
    for (std::int64_t key = 0; key < head.seen.range.count; ++key) {
      float* lanes = scratch_.scores + key * lanes_;
      for (std::int64_t lane = 0; lane < lanes_; ++lane)
        lanes[lane] = lane < num_rows_ ? head.scores.row(lane)[key] : 0;
    }
  }
  void from_panel(const Head& head) const {
    for (std::int64_t key = 0; key < head.seen.range.count; ++key) {
      for (int row = 0; row < num_rows_; ++row)
        head.scores.row(row)[key] = scratch_.scores[key * lanes_ + row];
    }
  }

  // ---- values that are not finite: see non_finite.hpp ----

  RowSet non_finite_rows(const Head& head) const {
    RowSet found = 0;
    for (int row = 0; row < num_rows_; ++row) {
      const float* sums = head.sums.row(row);
      const bool is_finite =
          std::isfinite(head.state.row_sum[row]) &&
          std::all_of(sums, sums + problem_.head_dim_v, [](float x) { return std::isfinite(x); });
      if (!is_finite) found |= RowSet{1} << row;
    }
    return found;
  }

  void collect_non_finite(const Head& head, std::int64_t tile) const {
    const KeyRange range = head.seen.range;
    const TileSource values = rows_of(call_.v, head, tile, range, cached_.value_rows);
    for (std::int64_t i = 0; i < range.count; ++i) {
      for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
        const float value = element_of(values, i, d);
        if (std::isfinite(value)) continue;
        for (int row = 0; row < num_rows_; ++row) {
          if (head.scores.row(row)[i] != -kInfinity) head.extra.row(row)[d] += value;
        }
      }
    }
  }

  void add_extra(const Head& head) const {
    for (std::int64_t i = 0; i < num_rows_ * head.sums.pitch; ++i)
      head.sums.data[i] += head.extra.data[i];
  }

  // ---- results ----

  void emit_rows(const Head& head, RowSet wanted, const EmitState& emit) const {
    ForwardItem rows = item_;
    rows.kv_head = head.index;
    for (int row = 0; row < num_rows_; ++row) {
      if ((wanted >> row & 1U) == 0) continue;
      const PanelState& s = head.state;
      std::copy_n(head.sums.row(row), problem_.head_dim_v, scratch_.states);
      settle({s.row_max[row], s.origin[row], s.row_sum[row]}, call_.unit, problem_.head_dim_v,
             scratch_.states);
      emit(rows, row, scratch_.states);
    }
  }

  static std::int64_t padded(std::int64_t width) { return FewRowsScratch::padded(width); }

  const ForwardCall& call_;
  const PanelKernels& kernels_;
  const ForwardProblem& problem_;
  const ForwardItem& item_;
  const ForwardScratch& scratch_;
  const FewRowsScratch& few_;
  const CacheScratch& cached_;
  const std::int64_t tile_kv_, lanes_;
  const int num_rows_;
  const std::int64_t block_keys_;
  std::vector<Head> heads_;
  bool is_careful_ = false;
};

}  // namespace

std::int64_t heads_at_once(const KeySource& k, std::int64_t num_heads_kv) {
  const bool lie_together = k.has_rows_first() || (k.page_size() > 0 && k.page_size() < kSmallPage);
  return lie_together ? std::min(num_heads_kv, kMaxHeadsAtOnce) : 1;
}

void walk_few_rows(const ForwardCall& call, const ForwardItem& item, const ForwardScratch& scratch,
                   const EmitState& emit) {
  FewRowsWalk(call, item, scratch).run(emit);
}

}  // namespace fovea::cpu
