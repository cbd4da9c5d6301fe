// Online-softmax attention over tiles, for one panel of queries at a time.
//
//   for each work item (sequence, kv head, block of rows; of one KV split where rows are few):
//     for each kv tile that some row can see:      from the block map, left to right
//       load K and V tile                          once per item and tile, shared by the panels
//       for each panel that sees the tile:         the first time: pack Qᵀ
//         S = K Qᵀ;  S = program(S);  S = mask(S)  mask on partial tiles only
//         P, max, sum = softmax(S);  O = O * rescale + Vᵀ P
//       for each panel that sees no more:  O / sum -> out, lse
//
// What is read or written next (rows of K and V, of queries of panels to come, of out) is fetched meanwhile.
//
// A row's arithmetic depends on its own queries, the keys of its sequence and tile_kv alone: lanes never mix, splits
// are cut by the sequence's own length, and merged in order. So batch mates, threads and scheduling cannot change a
// bit.
//
// NaN and infinity in keys nobody sees vanish in the mask. In values they would not (0 * NaN): a row whose result is
// not finite is computed again with such values taken out and added only where they are seen. The common path pays
// nothing.
#include "cpu/attention_forward.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>

#include "core/scalar_io.hpp"
#include "cpu/few_rows.hpp"
#include "cpu/key_source.hpp"
#include "cpu/operands.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"
#include "cpu/visible_keys.hpp"
#include "cpu/workspace.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kFewItemsPerWorker = 2;
using LaneSet = std::uint64_t;           // a bit for each row of a panel
constexpr float kSmallestUnit = 1e-30F;  // the reciprocal of a smaller one leaves fp32

/// Rows [row_begin, row_end) of one kv head against kv tiles [tile_begin, tile_end). Row r is query r % seqlen_q of
/// head kv_head * group + r / seqlen_q.
struct Item {
  Sequence sequence;
  std::int64_t kv_head = 0;
  std::int64_t num_heads =
      1;  // of k and v from kv_head on, with rows of their own: more where rows are few
  std::int64_t row_begin = 0, row_end = 0;
  std::int64_t tile_begin = 0, tile_end = 0;
};

struct Scratch : WorkerScratch {
  FewRowsScratch few{};
  PageScratch pages{};
};

class ForwardRun {
 public:
  ForwardRun(const ForwardProblem& problem, const ForwardPlan& plan, const AttentionForward& args,
             std::byte* workspace, Executor& executor, const GrownCache* cache)
      : problem_(problem),
        plan_(plan),
        spec_(plan.spec),
        args_(args),
        cache_(cache),
        kernels_(forward_kernels(plan.spec)),
        plain_kernels_(cpu::plain_kernels(plan.spec)),
        executor_(executor),
        q_(args.q),
        k_(cache ? cache->cache.k : args.k, cache ? cache->cache.page_table : TensorView()),
        v_(cache ? cache->cache.v : args.v, cache ? cache->cache.page_table : TensorView()),
        out_(args.out),
        score_bindings_(plan.score.bindings(args.score)),
        mask_bindings_(plan.mask.bindings(args.mask)),
        dropout_(panel_dropout(args.dropout)) {
    if (!plan.mapper) own_mapper_.emplace(args.mask, spec_.map_keys);
    mapper_ = plan.mapper ? &*plan.mapper : &*own_mapper_;
    has_program_ = !plan.score.empty();
    // The softmax works on raw scores and folds the scale into its exponent, where it can.
    is_prescaled_ = has_program_ || problem.softmax_scale < kSmallestUnit;
    unit_ = is_prescaled_ ? 1.0F : problem.softmax_scale;
    carve(workspace);
    count_items();
  }

  void run() {
    clear_padding_rows();
    for_each<&ForwardRun::compute_item>(first_item_[num_sequences()]);
    if (is_split_parallel_)
      for_each<&ForwardRun::merge_splits>(num_sequences() * problem_.num_heads_kv);
  }

 private:
  template <void (ForwardRun::*kTask)(int, std::int64_t)>
  void for_each(std::int64_t count) {
    run_tasks(executor_, count,
              [this](int worker, std::int64_t index) { (this->*kTask)(worker, index); });
  }

  // ---- work items ----

  std::int64_t num_sequences() const { return problem_.num_sequences; }

  Sequence sequence(std::int64_t index) const {
    if (cache_ == nullptr) return sequence_at(problem_, args_, index);
    const CachedSequence cached = cached_sequence(cache_->cache, index);
    return {.index = index,
            .batch_offset = index,
            .kv_begin = cached.begin,
            .seqlen_q = args_.q.size(1),
            .seqlen_kv = cached.end - cached.begin + cache_->num_new,
            .slot = cached.slot};
  }

  std::int64_t num_rows(const Sequence& s) const { return problem_.group * s.seqlen_q; }
  std::int64_t num_tiles(const Sequence& s) const { return ceil_div(s.seqlen_kv, spec_.tile_kv); }

  /// A function of the sequence's own lengths alone, so that its bits are.
  std::int64_t num_splits(const Sequence& s) const {
    if (num_rows(s) > spec_.lanes) return 1;
    return std::max<std::int64_t>(1, ceil_div(num_tiles(s), spec_.tiles_per_split));
  }

  /// So few rows, all in one panel, that K and V are read row by row (few_rows.hpp).
  bool is_few(const Sequence& s) const { return num_rows(s) <= std::min(kFewRows, spec_.lanes); }

  std::int64_t num_panels(const Sequence& s) const { return ceil_div(num_rows(s), spec_.lanes); }

  /// Panels in each item of a sequence and kv head: fewer towards the end of the call.
  std::int64_t panels_per_item(const Sequence& s, std::int64_t kv_head) const {
    const std::int64_t groups = num_sequences() * problem_.num_heads_kv;
    const std::int64_t left = groups - s.index * problem_.num_heads_kv - kv_head;
    const std::int64_t remaining = ceil_div(total_panels_ * left, groups);
    return std::min(spec_.panels, panels_of_an_item(remaining, plan_.num_workers));
  }

  std::int64_t num_row_blocks(const Sequence& s, std::int64_t kv_head) const {
    return ceil_div(num_panels(s), panels_per_item(s, kv_head));
  }

  /// Items of one sequence over all its kv heads.
  std::int64_t items_of(const Sequence& s) const {
    if (problem_.num_heads_q == 0 || s.seqlen_q == 0) return 0;
    if (has_one_panel(s)) return (is_split_parallel_ ? num_splits(s) : 1) * num_head_blocks(s);
    std::int64_t items = 0;
    for (std::int64_t head = 0; head < problem_.num_heads_kv; ++head)
      items += num_row_blocks(s, head);
    return items;
  }

  /// Then the items of a sequence are its splits and heads.
  bool has_one_panel(const Sequence& s) const { return num_rows(s) <= spec_.lanes; }

  std::int64_t num_head_blocks(const Sequence& s) const {
    return ceil_div(problem_.num_heads_kv, is_few(s) ? few_heads_ : 1);
  }

  void count_items() {
    is_split_parallel_ = plan_allows_parallel_splits();
    choose_few_heads();
    total_panels_ = 0;
    for (std::int64_t i = 0; i < num_sequences(); ++i)
      total_panels_ += num_panels(sequence(i)) * problem_.num_heads_kv;
    first_item_[0] = 0;
    for (std::int64_t i = 0; i < num_sequences(); ++i)
      first_item_[i + 1] = first_item_[i] + items_of(sequence(i));
  }

  /// Heads of an item of few rows: as many as lie together in memory, but enough items for every worker.
  void choose_few_heads() {
    std::int64_t items = 0;
    for (std::int64_t i = 0; i < num_sequences(); ++i) {
      const Sequence s = sequence(i);
      if (is_few(s)) items += is_split_parallel_ ? num_splits(s) : 1;
    }
    few_heads_ = heads_at_once(k_, problem_.num_heads_kv);
    while (few_heads_ > 1 && items * ceil_div(problem_.num_heads_kv, few_heads_) <
                                 kFewItemsPerWorker * plan_.num_workers)
      few_heads_ = ceil_div(few_heads_, 2);
  }

  /// Splits run side by side where there are too few other items to keep the workers busy: the bits are the same.
  bool plan_allows_parallel_splits() const { return partials_ != nullptr; }

  Item item_at(std::int64_t index) const {
    const std::int64_t* found =
        std::upper_bound(first_item_, first_item_ + num_sequences() + 1, index) - 1;
    const Sequence s = sequence(found - first_item_);
    const std::int64_t rest = index - *found;
    return has_one_panel(s) ? item_of_one_panel(s, rest) : item_of_rows(s, rest);
  }

  Item item_of_one_panel(const Sequence& s, std::int64_t index) const {
    // Rows of neighbouring heads mostly share a memory page: workers read them at the same time.
    const std::int64_t heads = is_few(s) ? few_heads_ : 1;
    const std::int64_t kv_head = index % num_head_blocks(s) * heads;
    Item item{.sequence = s,
              .kv_head = kv_head,
              .num_heads = std::min(heads, problem_.num_heads_kv - kv_head),
              .row_begin = 0,
              .row_end = num_rows(s),
              .tile_begin = 0,
              .tile_end = num_tiles(s)};
    if (is_split_parallel_ && num_splits(s) > 1) limit_to_split(item, index / num_head_blocks(s));
    return item;
  }

  Item item_of_rows(const Sequence& s, std::int64_t index) const {
    std::int64_t kv_head = 0;
    for (; index >= num_row_blocks(s, kv_head); ++kv_head) index -= num_row_blocks(s, kv_head);
    const std::int64_t block = num_row_blocks(s, kv_head) - 1 - index;  // causal: the longest first
    const std::int64_t block_rows = panels_per_item(s, kv_head) * spec_.lanes;
    return {.sequence = s,
            .kv_head = kv_head,
            .row_begin = block * block_rows,
            .row_end = std::min(num_rows(s), (block + 1) * block_rows),
            .tile_begin = 0,
            .tile_end = num_tiles(s)};
  }

  void limit_to_split(Item& item, std::int64_t split) const {
    item.tile_begin = split * spec_.tiles_per_split;
    item.tile_end = std::min(num_tiles(item.sequence), item.tile_begin + spec_.tiles_per_split);
  }

  // ---- one item ----

  void compute_item(int worker, std::int64_t index) {
    const Scratch& scratch = scratch_[static_cast<std::size_t>(worker)];
    Item item = item_at(index);
    const std::int64_t splits = num_splits(item.sequence);
    if (splits == 1) {
      compute(item, scratch, [&](const Item& rows, std::int64_t lane, float* state) {
        finish_row(rows, lane, state);
      });
      return;
    }
    if (is_split_parallel_) {
      compute(item, scratch, [&](const Item& rows, std::int64_t lane, float* state) {
        std::memcpy(partial(rows, lane), state, state_floats() * sizeof(float));
      });
      return;
    }
    for (std::int64_t split = 0; split < splits; ++split) {
      limit_to_split(item, split);
      compute(item, scratch, [&](const Item& rows, std::int64_t lane, float* state) {
        float* merged = merged_state(item, rows.kv_head, lane, scratch);
        if (split == 0) {
          std::memcpy(merged, state, state_floats() * sizeof(float));
        } else {
          merge_state(merged, state, problem_.head_dim_v);
        }
      });
    }
    for (Item rows = item; rows.kv_head < item.kv_head + item.num_heads; ++rows.kv_head) {
      for (std::int64_t lane = 0; lane < item.row_end - item.row_begin; ++lane)
        finish_row(rows, lane, merged_state(item, rows.kv_head, lane, scratch));
    }
  }

  float* merged_state(const Item& item, std::int64_t kv_head, std::int64_t lane,
                      const Scratch& scratch) const {
    if (!is_few(item.sequence))
      return scratch.merged + static_cast<std::size_t>(lane) * state_floats();
    const std::int64_t row = (kv_head - item.kv_head) * kFewRows + lane;
    return scratch.few.merged + static_cast<std::size_t>(row) * state_floats();
  }

  /// Calls emit(rows of one panel, lane, state) for each row. A state is head_dim_v sums, the maximum in natural units,
  /// the sum.
  template <typename Emit>
  void compute(const Item& item, const Scratch& scratch, const Emit& emit) const {
    if (is_few(item.sequence)) return compute_few(item, scratch, emit);
    std::array<LaneSet, kMaxPanels> redo{};
    walk_tiles(item, scratch, kernels_, /*is_careful=*/false, [&](std::int64_t panel) {
      const Item rows = panel_rows(item, panel);
      LaneSet& broken = redo[static_cast<std::size_t>(panel)];
      broken = non_finite_rows(rows, panel, scratch);
      emit_panel(rows, panel, ~broken, scratch, emit);
    });
    for (std::int64_t panel = 0; panel < kMaxPanels; ++panel) {
      if (redo[static_cast<std::size_t>(panel)] != 0) {
        compute_carefully(panel_rows(item, panel), redo[static_cast<std::size_t>(panel)], scratch,
                          emit);
      }
    }
  }

  template <typename Emit>
  void compute_few(const Item& item, const Scratch& scratch, const Emit& emit) const {
    const FewRowsCall call{
        problem_,       plan_,    plain_kernels_, q_,   k_, v_, *mapper_, score_bindings_,
        mask_bindings_, dropout_, is_prescaled_,  unit_};
    const FewRowsItem few{item.sequence, item.kv_head, item.kv_head + item.num_heads,
                          item.tile_begin, item.tile_end};
    walk_few_rows(call, few, scratch, scratch.few, scratch.pages,
                  [&](std::int64_t kv_head, std::int64_t row, float* state) {
                    Item rows = item;
                    rows.kv_head = kv_head;
                    emit(rows, row, state);
                  });
  }

  /// Infinities in parts of operands become NaN, where fp32 numbers need not: such rows go the plain way in the end.
  template <typename Emit>
  void compute_carefully(const Item& rows, LaneSet wanted, const Scratch& scratch,
                         const Emit& emit) const {
    const auto later = [](std::int64_t) {};
    walk_tiles(rows, scratch, kernels_, /*is_careful=*/true, later);
    const LaneSet broken = spec_.is_split ? wanted & non_finite_sums(rows, 0, scratch) : 0;
    emit_panel(rows, 0, wanted & ~broken, scratch, emit);
    if (broken == 0) return;
    walk_tiles(rows, scratch, plain_kernels_, /*is_careful=*/true, later);
    emit_panel(rows, 0, broken, scratch, emit);
  }

  Item panel_rows(Item item, std::int64_t panel) const {
    item.row_begin += panel * spec_.lanes;
    item.row_end = std::min(item.row_end, item.row_begin + spec_.lanes);
    return item;
  }

  struct Panel {
    Item rows;
    std::byte* queries;
    float* out;
    PanelState state;
    const std::int32_t* q_idx;
    const std::int32_t* q_head;
    int num_vectors;
    VisibleKeys keys{};
    SeenKeys seen{};     // null where only the mask program knows
    KeyRange reach{};    // from the first key that it sees to the last
    VisiblePart part{};  // of the current tile
    bool is_started = false, is_done = false;

    std::int64_t num_rows() const { return rows.row_end - rows.row_begin; }
    bool ends_before(std::int64_t key) const { return reach.begin + reach.count <= key; }
  };

  /// Scores of one panel and tile, and what remains to be done with them.
  struct Step {
    const Panel* panel = nullptr;
    std::int64_t tile = 0, num_keys = 0;
    VisiblePart seen{};
    float* scores = nullptr;
  };

  /// Keys and values of a tile as the kernels left them.
  struct Tile {
    std::int64_t index = 0;
    KeyTile keys{};
  };

  /// Sets up the processor's matrix unit, if the kernels use one, for as long as this lives.
  class KernelScope {
   public:
    explicit KernelScope(const PanelKernels& kernels) : kernels_(kernels) {
      if (kernels_.start != nullptr) kernels_.start();
    }
    ~KernelScope() {
      if (kernels_.stop != nullptr) kernels_.stop();
    }
    KernelScope(const KernelScope&) = delete;
    KernelScope& operator=(const KernelScope&) = delete;

   private:
    const PanelKernels& kernels_;
  };

  /// Calls done(panel) as soon as a panel's sums are complete.
  template <typename Done>
  void walk_tiles(const Item& item, const Scratch& scratch, const PanelKernels& kernels,
                  bool is_careful, const Done& done) const {
    const KernelScope scope(kernels);
    std::vector<Panel> panels = panels_of(item, scratch);
    if (is_careful) std::fill_n(scratch.extra, out_floats(), 0.0F);
    NextTile next;
    Fetches fetches;
    PanelPipeline pipeline = pipeline_of(scratch);
    Walk walk{this, &item, &scratch};
    const auto finish = [&](Panel& panel) {
      if (!panel.is_started) start_panel(panel, scratch, kernels);
      panel.is_done = true;
      done(&panel - panels.data());
    };
    for (std::int64_t index = first_tile(item, panels); index < item.tile_end; ++index) {
      const std::int64_t kv_begin = index * spec_.tile_kv;
      const std::int64_t kv_end = std::min(kv_begin + spec_.tile_kv, item.sequence.seqlen_kv);
      std::int64_t num_seeing = 0;
      for (Panel& panel : panels) {
        panel.part = panel.keys.next(kv_begin, kv_end);
        num_seeing += static_cast<std::int64_t>(panel.part.range.count > 0);
      }
      if (num_seeing == 0) continue;
      const Tile tile = load_tile(item, index, scratch, kernels, is_careful);
      next = next_fetches(item, index, panels, num_seeing, scratch, fetches);
      for (Panel& panel : panels) {
        if (panel.part.range.count == 0) continue;
        if (!panel.is_started) start_panel(panel, scratch, kernels);
        if (!is_careful && has_pipeline()) {
          walk.tile = index;
          kernels_.push(pipeline, turn_of(panel, tile.keys, walk), next);
          continue;
        }
        const Step step{&panel, index, tile.keys.num_keys, panel.part, scratch.scores};
        kernels.scores(panel.queries, tile.keys, panel.part.range, problem_.head_dim_qk,
                       panel.num_vectors, step.scores, next);
        finish_step(step, item, next, scratch, kernels, is_careful);
      }
      if (kernels_.flush != nullptr) kernels_.flush(pipeline, next);
      for (Panel& panel : panels) {
        if (!is_careful && panel.is_started && !panel.is_done && panel.ends_before(kv_end))
          finish(panel);
      }
    }
    if (is_careful) add_extra(panels.front().out, scratch.extra);
    for (Panel& panel : panels) {
      if (!panel.is_done) finish(panel);
    }
  }

  std::int64_t first_tile(const Item& item, const std::vector<Panel>& panels) const {
    std::int64_t first = item.tile_end;
    for (const Panel& panel : panels) {
      if (panel.reach.count > 0) first = std::min(first, panel.reach.begin / spec_.tile_kv);
    }
    return std::max(first, item.tile_begin);
  }

  Tile load_tile(const Item& item, std::int64_t index, const Scratch& scratch,
                 const PanelKernels& kernels, bool is_careful) const {
    const TileSource keys = key_tile(item, index, scratch);
    const TileSource values = value_tile(item, index, scratch);
    const KeyTile loaded = kernels.load_keys(at_one_stride(keys, scratch.pages.keys), scratch.keys);
    kernels.load_values(at_one_stride(values, scratch.pages.values), is_careful, scratch.values);
    return {index, loaded};
  }

  // ---- what is fetched meanwhile ----

  /// Rows of queries and of out that are due.
  struct Fetches {
    std::array<TileSource, 2 * kMaxPanels> sources{};
    std::size_t num_sources = 0;

    void add(const TileSource& source) { sources[num_sources++] = source; }
    std::span<const TileSource> all() const { return {sources.data(), num_sources}; }
  };

  /// While `num_seeing` panels work on a tile: queries of those that start in it or in the next one, out of those that
  /// end in it, the next tile.
  NextTile next_fetches(const Item& item, std::int64_t index, const std::vector<Panel>& panels,
                        std::int64_t num_seeing, const Scratch& scratch, Fetches& fetches) const {
    const std::int64_t end = (index + 1) * spec_.tile_kv;
    fetches.num_sources = 0;
    bool is_first = true;
    TileSource keys, values;
    for (const Panel& panel : panels) {
      const bool starts_soon =
          !panel.is_started && panel.reach.count > 0 && panel.reach.begin < end + spec_.tile_kv;
      if (starts_soon && !is_first) fetches.add(rows_of(q_, panel, problem_.head_dim_qk));
      is_first = false;
    }
    for (const Panel& panel : panels) {
      if (!panel.is_done && panel.part.range.count > 0 && panel.ends_before(end))
        fetches.add(rows_of(out_, panel, problem_.head_dim_v));
    }
    const bool goes_on =
        std::ranges::any_of(panels, [&](const Panel& panel) { return !panel.ends_before(end); });
    if (goes_on && index + 1 < item.tile_end) {
      keys = tile_of(k_, item, index + 1, problem_.head_dim_qk, scratch.pages.next_key_rows);
      values = tile_of(v_, item, index + 1, problem_.head_dim_v, scratch.pages.next_value_rows);
    }
    const std::int64_t blocks =
        spec_.tile_kv / kernels_.key_block + ceil_div(problem_.head_dim_v, kernels_.value_block);
    return {keys, values, num_seeing * blocks, fetches.all()};
  }

  /// Rows of a panel, where they lie at one stride.
  TileSource rows_of(const Rows& tensor, const Panel& panel, std::int64_t head_dim) const {
    const std::int64_t last = panel.num_rows() - 1;
    if (panel.q_head[0] != panel.q_head[last] || tensor.col_stride != 1) return {};
    const Sequence& s = panel.rows.sequence;
    return {.data = tensor.at(s.batch_offset, s.q_begin + panel.q_idx[0], panel.q_head[0]),
            .dtype = tensor.dtype,
            .row_stride = tensor.row_stride,
            .num_rows = panel.num_rows(),
            .num_cols = head_dim};
  }

  PanelPipeline pipeline_of(const Scratch& scratch) const {
    return {.memory = scratch.pipeline,
            .tile_kv = spec_.tile_kv,
            .head_dim_qk = problem_.head_dim_qk,
            .head_dim_v = problem_.head_dim_v,
            .scale_log2 = unit_ * std::numbers::log2e_v<float>};
  }

  /// Dropout comes between the sum and the product, where the pipeline has no place for it.
  bool has_pipeline() const { return kernels_.push != nullptr && dropout_.threshold == 0; }

  /// Where a turn of the pipeline finds its programs' data.
  struct Walk {
    const ForwardRun* run;
    const Item* item;
    const Scratch* scratch;
    std::int64_t tile = 0;
  };

  PanelTurn turn_of(const Panel& panel, const KeyTile& keys, const Walk& walk) const {
    const VisiblePart& visible = panel.part;
    std::uint32_t prepared = is_prescaled_ ? ~0U : 0;
    for (int i = 0; i < visible.num_partial; ++i) {
      const KeyRange part = visible.partial[static_cast<std::size_t>(i)];
      for (std::int64_t at = part.begin; at < part.begin + part.count; at += kSubTileKeys)
        prepared |= 1U << (at - visible.range.begin) / kSubTileKeys;
    }
    return {.queries = panel.queries,
            .keys = keys,
            .values = walk.scratch->values,
            .range = visible.range,
            .out = panel.out,
            .state = panel.state,
            .prepare = &ForwardRun::prepare_part,
            .prepared = prepared,
            .walk = &walk,
            .panel = &panel};
  }

  static void prepare_part(const PanelTurn& turn, KeyRange part, float* scores) {
    const Walk& walk = *static_cast<const Walk*>(turn.walk);
    const Panel& panel = *static_cast<const Panel*>(turn.panel);
    const VisiblePart& visible = panel.part;
    Step step{&panel, walk.tile, turn.keys.num_keys, {.range = part}, scores};
    for (int i = 0; i < visible.num_partial; ++i) {
      const KeyRange whole = visible.partial[static_cast<std::size_t>(i)];
      const std::int64_t begin = std::max(whole.begin, part.begin);
      const std::int64_t end = std::min(whole.begin + whole.count, part.begin + part.count);
      if (begin < end)
        step.seen.partial[static_cast<std::size_t>(step.seen.num_partial++)] = {begin, end - begin};
    }
    walk.run->apply_programs(step, *walk.item, *walk.scratch, /*is_careful=*/false);
  }

  /// Scores are there: programs, softmax, product with V.
  void finish_step(const Step& step, const Item& item, NextTile& next, const Scratch& scratch,
                   const PanelKernels& kernels, bool is_careful) const {
    const Panel& panel = *step.panel;
    apply_programs(step, item, scratch, is_careful);
    kernels.softmax(step.scores, step.seen.range.count, panel.num_vectors,
                    unit_ * std::numbers::log2e_v<float>, panel.state, dropout_of(step, item));
    kernels.accumulate(scratch.values, step.num_keys, step.seen.range, step.scores,
                       problem_.head_dim_v, panel.num_vectors, panel.state.rescale, panel.out,
                       next);
  }

  static TileSource at_one_stride(const TileSource& source, std::byte* buffer) {
    return source.rows == nullptr ? source : gathered(source, buffer);
  }

  /// Scale, score program and mask of one tile's scores.
  void apply_programs(const Step& step, const Item& item, const Scratch& scratch,
                      bool is_careful) const {
    const Panel& panel = *step.panel;
    const VisiblePart& seen = step.seen;
    const std::int64_t num_keys = seen.range.count;
    if (is_prescaled_) kernels_.scale(step.scores, num_keys, problem_.softmax_scale);
    ProgramTile program{.scores = step.scores,
                        .num_keys = num_keys,
                        .lanes = static_cast<int>(spec_.lanes),
                        .kv_begin = step.tile * spec_.tile_kv + seen.range.begin,
                        .q_idx = panel.q_idx,
                        .q_head = panel.q_head,
                        .batch = static_cast<std::int32_t>(item.sequence.index),
                        .kv_head = static_cast<std::int32_t>(item.kv_head),
                        .seqlen_q = static_cast<std::int32_t>(item.sequence.seqlen_q),
                        .seqlen_kv = static_cast<std::int32_t>(item.sequence.seqlen_kv),
                        .scratch = scratch.program};
    if (has_program_) {
      program.tensors = score_bindings_.tensors.data();
      program.scalars = score_bindings_.scalars.data();
      kernels_.run_score(plan_.score.tape, program);
    }
    program.tensors = mask_bindings_.tensors.data();
    program.scalars = mask_bindings_.scalars.data();
    for (int i = 0; i < seen.num_partial; ++i) {
      const KeyRange part = seen.partial[static_cast<std::size_t>(i)];
      program.scores = step.scores + (part.begin - seen.range.begin) * spec_.lanes;
      program.num_keys = part.count;
      program.kv_begin = step.tile * spec_.tile_kv + part.begin;
      if (panel.seen.begin != nullptr) {
        kernels_.hide(program.scores, part.count, program.kv_begin, panel.seen);
      } else {
        kernels_.run_mask(plan_.mask.tape, program);
      }
    }
    if (is_careful) collect_non_finite(step, item, scratch);
  }

  PanelDropout dropout_of(const Step& step, const Item& item) const {
    PanelDropout dropout = dropout_;
    dropout.batch = static_cast<std::uint32_t>(item.sequence.index);
    dropout.kv_begin = step.tile * spec_.tile_kv + step.seen.range.begin;
    dropout.q_idx = step.panel->q_idx;
    dropout.q_head = step.panel->q_head;
    return dropout;
  }

  std::vector<Panel> panels_of(const Item& item, const Scratch& scratch) const {
    const std::int64_t count = ceil_div(item.row_end - item.row_begin, spec_.lanes);
    std::vector<Panel> panels;
    panels.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i)
      panels.push_back(panel_of(panel_rows(item, i), i, scratch));
    return panels;
  }

  /// Its place in the problem and what it sees; nothing is read of its rows.
  Panel panel_of(const Item& rows, std::int64_t panel, const Scratch& scratch) const {
    const auto lanes = static_cast<std::size_t>(spec_.lanes);
    const auto index = static_cast<std::size_t>(panel);
    const std::int64_t count = rows.row_end - rows.row_begin;
    std::int32_t* q_idx = scratch.q_idx + index * lanes;
    std::int32_t* q_head = scratch.q_head + index * lanes;
    for (std::int64_t lane = 0; lane < spec_.lanes; ++lane) {
      // Padding lanes repeat the last row, so that programs read what exists.
      const std::int64_t row = rows.row_begin + std::min(lane, count - 1);
      q_idx[lane] = static_cast<std::int32_t>(row % rows.sequence.seqlen_q);
      q_head[lane] =
          static_cast<std::int32_t>(rows.kv_head * problem_.group + row / rows.sequence.seqlen_q);
    }
    Panel p{.rows = rows,
            .queries = scratch.queries + index * kernels_.query_bytes(problem_.head_dim_qk),
            .out = reinterpret_cast<float*>(scratch.out +
                                            index * kernels_.output_bytes(problem_.head_dim_v)),
            .state = {.row_max = scratch.row_max + index * lanes,
                      .row_sum = scratch.row_sum + index * lanes,
                      .rescale = scratch.rescale,
                      .origin = scratch.origin + index * lanes},
            .q_idx = q_idx,
            .q_head = q_head,
            .num_vectors = static_cast<int>(ceil_div(count, kernels_.vector_lanes)),
            .keys = {.unit = spec_.map_keys}};
    const auto edges =
        mapper_->row(tile_row(rows.sequence, rows.kv_head, q_idx, q_head, count), p.keys.runs);
    if (edges) p.seen = seen_keys(*edges, q_idx, index, scratch);
    p.reach = p.keys.all(rows.sequence.seqlen_kv);
    return p;
  }

  void start_panel(Panel& panel, const Scratch& scratch, const PanelKernels& kernels) const {
    const Sequence& s = panel.rows.sequence;
    for (std::int64_t lane = 0; lane < spec_.lanes; ++lane) {
      scratch.rows[lane] =
          lane < panel.num_rows()
              ? q_.at(s.batch_offset, s.q_begin + panel.q_idx[lane], panel.q_head[lane])
              : nullptr;
    }
    kernels.pack_queries(scratch.rows, q_.dtype, q_.col_stride, problem_.head_dim_qk,
                         panel.queries);
    std::fill_n(panel.state.row_max, spec_.lanes, -kInfinity);
    std::fill_n(panel.state.origin, spec_.lanes, -kInfinity);
    std::fill_n(panel.state.row_sum, spec_.lanes, 0.0F);
    std::fill_n(panel.out, out_floats(), 0.0F);
    panel.is_started = true;
  }

  SeenKeys seen_keys(const mask::BandEdges& edges, const std::int32_t* q_idx, std::size_t panel,
                     const Scratch& scratch) const {
    const auto lanes = static_cast<std::size_t>(spec_.lanes);
    std::int32_t* begin = scratch.seen_begin + panel * lanes;
    std::int32_t* end = scratch.seen_end + panel * lanes;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const mask::Span keys = edges.keys_of(q_idx[lane]);
      begin[lane] = static_cast<std::int32_t>(keys.begin);
      end[lane] = static_cast<std::int32_t>(keys.end);
    }
    return {begin, end};
  }

  TileSource tile_of(const KeySource& source, const Item& item, std::int64_t tile,
                     std::int64_t head_dim, const std::byte** row_list) const {
    const std::int64_t begin = tile * spec_.tile_kv;
    const std::int64_t count = std::min(spec_.tile_kv, item.sequence.seqlen_kv - begin);
    return source.tile(item.sequence, item.kv_head, begin, count, head_dim, row_list);
  }

  TileSource key_tile(const Item& item, std::int64_t tile, const Scratch& scratch) const {
    return tile_of(k_, item, tile, problem_.head_dim_qk, scratch.pages.key_rows);
  }

  TileSource value_tile(const Item& item, std::int64_t tile, const Scratch& scratch) const {
    return tile_of(v_, item, tile, problem_.head_dim_v, scratch.pages.value_rows);
  }

  // ---- values that are not finite ----

  LaneSet non_finite_sums(const Item& rows, std::int64_t panel, const Scratch& scratch) const {
    const float* row_sum = scratch.row_sum + panel * spec_.lanes;
    LaneSet found = 0;
    for (std::int64_t lane = 0; lane < rows.row_end - rows.row_begin; ++lane) {
      if (!std::isfinite(row_sum[lane])) found |= LaneSet{1} << lane;
    }
    return found;
  }

  /// Rows alone, so that a row's bits do not depend on what its neighbours see.
  LaneSet non_finite_rows(const Item& rows, std::int64_t panel, const Scratch& scratch) const {
    LaneSet found = non_finite_sums(rows, panel, scratch);
    const std::int64_t count = rows.row_end - rows.row_begin;
    const float* out = panel_out(panel, scratch);
    const auto num_vectors = static_cast<int>(ceil_div(count, kernels_.vector_lanes));
    if (kernels_.is_finite(out, problem_.head_dim_v, num_vectors)) return found;
    for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
      for (std::int64_t lane = 0; lane < count; ++lane) {
        if (!std::isfinite(out[d * spec_.lanes + lane])) found |= LaneSet{1} << lane;
      }
    }
    return found;
  }

  float* panel_out(std::int64_t panel, const Scratch& scratch) const {
    return reinterpret_cast<float*>(scratch.out + static_cast<std::size_t>(panel) *
                                                      kernels_.output_bytes(problem_.head_dim_v));
  }

  /// Adds what values that are not finite give to the rows that see them. scores hold -inf where a key is hidden.
  void collect_non_finite(const Step& step, const Item& item, const Scratch& scratch) const {
    const TileSource values = value_tile(item, step.tile, scratch);
    const KeyRange range = step.seen.range;
    for (std::int64_t i = 0; i < range.count; ++i) {
      for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
        const float value = as_multiplied(
            load_scalar(values.row(range.begin + i), values.dtype, d * values.col_stride));
        if (std::isfinite(value)) continue;
        for (std::int64_t lane = 0; lane < spec_.lanes; ++lane) {
          if (step.scores[i * spec_.lanes + lane] != -kInfinity)
            scratch.extra[d * spec_.lanes + lane] += value;
        }
      }
    }
  }

  /// A value as the products see it: bf16 rounds the largest fp32 numbers to infinity.
  float as_multiplied(float value) const {
    return kernels_.product == Dtype::bf16 ? static_cast<float>(bfloat16(value)) : value;
  }

  void add_extra(float* out, const float* extra) const {
    for (std::size_t i = 0; i < out_floats(); ++i) out[i] += extra[i];
  }

  // ---- states and results ----

  std::size_t state_floats() const {
    return static_cast<std::size_t>(cpu::state_floats(problem_.head_dim_v));
  }
  std::size_t out_floats() const {
    return kernels_.output_bytes(problem_.head_dim_v) / sizeof(float);
  }

  template <typename Emit>
  void emit_panel(const Item& rows, std::int64_t panel, LaneSet wanted, const Scratch& scratch,
                  const Emit& emit) const {
    const std::int64_t width = problem_.head_dim_v;
    const std::int64_t pitch = state_pitch(width);
    const std::int64_t num_rows = rows.row_end - rows.row_begin;
    for (std::int64_t lane = 0; lane < num_rows; ++lane) {
      const std::int64_t place = lane % kRowsAtOnce;
      if (place == 0) {
        const LaneRange lanes{lane, std::min(kRowsAtOnce, num_rows - lane)};
        kernels_.extract_rows(panel_out(panel, scratch), lanes, width, scratch.states, pitch);
      }
      if ((wanted >> lane & 1U) == 0) continue;
      float* state = scratch.states + place * pitch;
      const std::int64_t row = panel * spec_.lanes + lane;
      settle({scratch.row_max[row], scratch.origin[row], scratch.row_sum[row]}, unit_, width,
             state);
      emit(rows, lane, state);
    }
  }

  /// What a row's sums are divided by, its lse, and whether it sees nothing.
  struct Denominator {
    float factor = 0;
    double lse = -kInfinity;
  };

  /// Relative to the larger of row maximum and sink, which joins the denominator here. A row that sees nothing has sums
  /// of 0.
  Denominator denominator(double row_max, double row_sum, std::int64_t q_head) const {
    const bool is_empty = row_max == -kInfinity;
    if (!args_.sinks) {
      if (is_empty) return {};
      return {static_cast<float>(1 / row_sum), args_.lse ? row_max + std::log(row_sum) : 0};
    }
    const double sink =
        static_cast<const float*>(args_.sinks.data())[q_head * args_.sinks.stride(0)];
    const double top = largest_of(row_max, sink);
    if (top == -kInfinity) return {};
    const double own = is_empty ? 0 : std::exp(row_max - top);
    const double total = (is_empty ? 0 : row_sum * own) + sink_share(sink, top);
    if (is_empty) return {0, top + std::log(total)};
    return {static_cast<float>(own / total), top + std::log(total)};
  }

  /// Divides by the denominator and writes out, lse and row_max.
  void finish_row(const Item& rows, std::int64_t lane, float* state) const {
    const std::int64_t width = problem_.head_dim_v;
    const std::int64_t index = rows.row_begin + lane;
    const std::int64_t q_idx = index % rows.sequence.seqlen_q;
    const std::int64_t q_head = rows.kv_head * problem_.group + index / rows.sequence.seqlen_q;
    Denominator d = denominator(state[width], state[width + 1], q_head);
    if (d.factor == 0) {  // beside a far larger sink
      std::transform(state, state + width, state, [](float sum) { return weighed(0, sum); });
      d.factor = 1;
    }
    write_out(rows.sequence, q_idx, q_head, state, d.factor);
    write_row_value(args_.lse, rows.sequence, q_idx, q_head, d.lse);
    write_row_value(args_.row_max, rows.sequence, q_idx, q_head, state[width]);
  }

  void write_out(const Sequence& s, std::int64_t q_idx, std::int64_t q_head, const float* row,
                 float factor) const {
    kernels_.store_row(row, factor, problem_.head_dim_v, out_.dtype, out_.col_stride,
                       out_.at(s.batch_offset, s.q_begin + q_idx, q_head));
  }

  void write_row_value(const TensorView& view, const Sequence& s, std::int64_t q_idx,
                       std::int64_t q_head, double value) const {
    if (!view) return;
    static_cast<float*>(view.mutable_data())[row_value_offset(view, s, q_idx, q_head)] =
        static_cast<float>(value);
  }

  /// Packed rows behind the last sequence belong to nobody: out 0, lse -inf.
  void clear_padding_rows() const {
    if (!problem_.is_varlen) return;
    const std::vector<float> zeros(static_cast<std::size_t>(problem_.head_dim_v), 0.0F);
    for (std::int64_t row = cu_seqlen(args_.cu_seqlens_q, num_sequences()); row < problem_.total_q;
         ++row) {
      const Sequence nobody{.q_begin = row};
      for (std::int64_t head = 0; head < problem_.num_heads_q; ++head) {
        write_out(nobody, 0, head, zeros.data(), 1.0F);
        write_row_value(args_.lse, nobody, 0, head, -kInfinity);
        write_row_value(args_.row_max, nobody, 0, head, -kInfinity);
      }
    }
  }

  // ---- splits side by side ----

  /// The state of one row of one split; item.tile_begin tells the split.
  float* partial(const Item& item, std::int64_t lane) const {
    const std::int64_t splits = max_splits(spec_, problem_);
    const std::int64_t split = item.tile_begin / spec_.tiles_per_split;
    const std::int64_t group = item.sequence.index * problem_.num_heads_kv + item.kv_head;
    const std::int64_t rows = max_split_rows(spec_, problem_);
    return partials_ +
           static_cast<std::size_t>((group * splits + split) * rows + item.row_begin + lane) *
               state_floats();
  }

  void merge_splits(int /*worker*/, std::int64_t index) {
    Item item{.sequence = sequence(index / problem_.num_heads_kv),
              .kv_head = index % problem_.num_heads_kv};
    const std::int64_t splits = num_splits(item.sequence);
    if (splits == 1 || problem_.num_heads_q == 0) return;
    item.row_end = num_rows(item.sequence);
    for (std::int64_t lane = 0; lane < item.row_end; ++lane) {
      item.tile_begin = 0;
      float* merged = partial(item, lane);
      for (std::int64_t split = 1; split < splits; ++split) {
        item.tile_begin = split * spec_.tiles_per_split;
        merge_state(merged, partial(item, lane), problem_.head_dim_v);
      }
      finish_row(item, lane, merged);
    }
  }

  // ---- set-up ----

  void carve(std::byte* workspace) {
    Carver carver(workspace);
    first_item_ = carver.take<std::int64_t>(static_cast<std::size_t>(num_sequences()) + 1);
    for (int worker = 0; worker < plan_.num_workers; ++worker) {
      scratch_.push_back({WorkerScratch::carve(carver, spec_, kernels_, problem_.head_dim_qk,
                                               problem_.head_dim_v, plan_.program_bytes),
                          FewRowsScratch::carve(carver, spec_, problem_),
                          PageScratch::carve(carver, spec_, problem_)});
    }
    const std::size_t partial_floats = num_partial_floats(spec_, problem_, plan_.num_workers);
    if (partial_floats > 0) partials_ = carver.take<float>(partial_floats);
  }

  const ForwardProblem& problem_;
  const ForwardPlan& plan_;
  const ForwardSpec& spec_;
  const AttentionForward& args_;
  const GrownCache* const cache_;
  const PanelKernels& kernels_;
  const PanelKernels& plain_kernels_;
  Executor& executor_;
  const Rows q_;
  const KeySource k_, v_;
  const Rows out_;
  const Bindings score_bindings_, mask_bindings_;
  std::optional<mask::BlockMapper> own_mapper_;
  const mask::BlockMapper* mapper_ = nullptr;
  bool has_program_ = false, is_prescaled_ = false, is_split_parallel_ = false;
  float unit_ = 1;
  std::int64_t few_heads_ = 1;  // of an item of few rows
  std::int64_t total_panels_ = 0;
  const PanelDropout dropout_;
  std::int64_t* first_item_ = nullptr;  // [num_sequences + 1]
  std::vector<Scratch> scratch_;
  float* partials_ = nullptr;  // [num_sequences][num_heads_kv][splits][rows][head_dim_v + 2]
};

}  // namespace

void attention_forward(const ForwardProblem& problem, const ForwardPlan& plan,
                       const AttentionForward& args, std::byte* workspace, Executor& executor,
                       const GrownCache* cache) {
  ForwardRun(problem, plan, args, workspace, executor, cache).run();
}

}  // namespace fovea::cpu
