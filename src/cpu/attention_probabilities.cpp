// Scores of a panel of rows against all keys of their sequence, programs on them, then a row at a time
//   p_j = exp(f_j - m) / (exp(sink - m) + Σ exp(f_i - m)),      m the largest of f and the sink:
// the steps of attention_forward in fp32, but that all keys of a panel are one tile.
//
// Bound: the product, half of attention_forward's, and a panel of scores that goes through the second-level cache four
// times. Rows that meet something that is not finite are computed again by the plain formula, in fp64.
//
// A task writes the rows [begin, begin + lanes) of one query head of one sequence, in all their columns: no element is
// written twice, and none is left, behind the end of a packed sequence neither.
#include "cpu/attention_probabilities.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "core/philox.hpp"
#include "core/scalar_io.hpp"
#include "cpu/carver.hpp"
#include "cpu/plain_panel.hpp"
#include "cpu/row_state.hpp"
#include "cpu/tasks.hpp"

namespace fovea::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t kTileKeys =
    128;  // multiplied and written at once: what of a panel fits in L1
constexpr std::int64_t kRowsAtOnce = 4;  // that leave a panel

/// What a worker computes in.
struct Scratch {
  const std::byte** rows = nullptr;   // [lanes]
  std::byte* queries = nullptr;       // of a panel
  std::byte* keys = nullptr;          // of a tile
  float* scores = nullptr;            // [columns][lanes]
  PanelState state{};                 // [lanes]
  float* probabilities = nullptr;     // [kRowsAtOnce][kTileKeys]
  std::uint8_t* is_hidden = nullptr;  // [columns][lanes], for dropout
  std::byte* program = nullptr;
};

class ProbabilitiesRun {
 public:
  ProbabilitiesRun(const ForwardProblem& problem, const AttentionProbabilities& args,
                   Executor& executor)
      : problem_(problem),
        forward_(args.forward),
        q_(args.forward.q),
        k_(args.forward.k),
        view_(args.probabilities),
        kernels_(best_f32_kernels()),
        executor_(executor),
        drop_threshold_(philox::drop_threshold(args.forward.dropout.p)),
        dropout_key_(key_of(dropout_of(args.forward))),
        dropout_places_(dropout_places_of(args.forward)),
        score_(formula_of(args.forward.score)),
        mask_(formula_of(args.forward.mask)) {}

  void run() {
    const std::int64_t panels = ceil_div(view_.size(2), kernels_.lanes);
    const std::int64_t heads = problem_.num_heads_q;
    memory_.resize(static_cast<std::size_t>(executor_.concurrency()));
    run_tasks(executor_, problem_.num_sequences * heads * panels,
              [&](int worker, std::int64_t task) {
                const Sequence s = sequence_at(problem_, forward_, task / panels / heads);
                write_rows(s, task / panels % heads, task % panels * kernels_.lanes, worker);
              });
  }

 private:
  void write_rows(const Sequence& s, std::int64_t q_head, std::int64_t begin, int worker) {
    const std::int64_t end = std::min(begin + kernels_.lanes, view_.size(2));
    const std::int64_t count = std::clamp<std::int64_t>(s.seqlen_q - begin, 0, end - begin);
    if (count > 0) write_panel(s, q_head, begin, count, scratch_of(worker));
    for (std::int64_t row = begin + count; row < end; ++row) clear(s, q_head, row, 0);
  }

  Scratch scratch_of(int worker) {
    AlignedBytes& memory = memory_[static_cast<std::size_t>(worker)];
    const auto lanes = static_cast<std::size_t>(kernels_.lanes);
    Scratch scratch;
    const auto carve = [&](Carver carver) {
      scratch.rows = carver.take<const std::byte*>(lanes);
      scratch.queries = carver.take<std::byte>(kernels_.query_bytes(problem_.head_dim_qk));
      scratch.keys = carver.take<std::byte>(kernels_.key_bytes(kTileKeys, problem_.head_dim_qk));
      scratch.scores = carver.take<float>(static_cast<std::size_t>(view_.size(3)) * lanes);
      scratch.state = {.row_max = carver.take<float>(lanes),
                       .row_sum = carver.take<float>(lanes),
                       .rescale = carver.take<float>(lanes)};
      scratch.probabilities = carver.take<float>(static_cast<std::size_t>(kRowsAtOnce * kTileKeys));
      scratch.is_hidden = carver.take<std::uint8_t>(
          drop_threshold_ > 0 ? static_cast<std::size_t>(view_.size(3)) * lanes : 0);
      scratch.program = carver.take<std::byte>(
          std::max(plain_scratch_bytes(score_, kernels_), plain_scratch_bytes(mask_, kernels_)));
      return carver.used();
    };
    if (memory.data() == nullptr) memory = AlignedBytes(carve(Carver(nullptr)));
    carve(Carver(memory.data()));
    return scratch;
  }

  void write_panel(const Sequence& s, std::int64_t q_head, std::int64_t begin, std::int64_t count,
                   const Scratch& scratch) const {
    const std::int64_t group = problem_.group;
    const PlainPanel panel = plain_panel(
        s, {q_head / group, q_head % group * s.seqlen_q + begin, count}, group, kernels_.lanes);
    multiply(panel, scratch);
    run_programs(panel, scratch);
    if (drop_threshold_ > 0) find_hidden(s.seqlen_kv, scratch);
    softmax(panel, static_cast<float>(sink_of(q_head)), scratch);
    write_tiles(panel, scratch);
    bool is_plain = false;
    for (std::int64_t lane = 0; lane < count; ++lane) {
      if (std::isfinite(scratch.state.row_sum[lane])) continue;
      if (!is_plain) {
        multiply_plain(panel, scratch.scores);
        run_programs(panel, scratch);
        is_plain = true;
      }
      write_row(panel, lane, scratch.scores);
    }
  }

  void run_programs(const PlainPanel& panel, const Scratch& scratch) const {
    run_score(score_, kernels_, panel, scratch.scores, scratch.program);
    run_mask(mask_, kernels_, panel, scratch.scores, scratch.program);
  }

  int num_vectors(const PlainPanel& panel) const {
    return static_cast<int>(ceil_div(panel.num_rows, kernels_.vector_lanes));
  }

  /// scores[key][lane] = scale q·k
  void multiply(const PlainPanel& panel, const Scratch& scratch) const {
    const Sequence& s = panel.sequence;
    for (std::int64_t lane = 0; lane < kernels_.lanes; ++lane) {
      const RowPlace at = panel.place(lane);
      scratch.rows[lane] = lane < panel.num_rows ? q_.at(at.batch, at.row, at.head) : nullptr;
    }
    kernels_.pack_queries(scratch.rows, q_.dtype, q_.col_stride, problem_.head_dim_qk,
                          scratch.queries);
    for (std::int64_t key = 0; key < s.seqlen_kv; key += kTileKeys) {
      const std::int64_t count = std::min(kTileKeys, s.seqlen_kv - key);
      const KeyTile keys =
          kernels_.load_keys({.data = k_.at(s.batch_offset, s.kv_begin + key, panel.kv_head),
                              .dtype = k_.dtype,
                              .row_stride = k_.row_stride,
                              .col_stride = k_.col_stride,
                              .num_rows = count,
                              .num_cols = problem_.head_dim_qk},
                             scratch.keys);
      float* scores = scratch.scores + key * kernels_.lanes;
      NextTile nothing;
      kernels_.scores(scratch.queries, keys, {0, count}, problem_.head_dim_qk, num_vectors(panel),
                      scores, nothing);
      kernels_.scale(scores, count, problem_.softmax_scale);
    }
  }

  /// Once they are probabilities, a hidden key is 0 as well as one whose probability rounds to 0, which may be dropped.
  void find_hidden(std::int64_t num_keys, const Scratch& scratch) const {
    for (std::int64_t i = 0; i < num_keys * kernels_.lanes; ++i)
      scratch.is_hidden[i] = scratch.scores[i] == -kInfinity ? 1 : 0;
  }

  /// Of one row and tile.
  void mark_dropped(const PlainPanel& panel, std::int64_t lane, KeyRange keys,
                    const Scratch& scratch, float* row) const {
    const auto at = static_cast<std::size_t>(lane);
    const std::uint8_t* is_hidden = scratch.is_hidden + keys.begin * kernels_.lanes + lane;
    for (std::int64_t i = 0; i < keys.count; ++i) {
      const bool is_marked =
          is_hidden[i * kernels_.lanes] == 0 &&
          is_dropped(panel.sequence, panel.q_head[at], panel.q_idx[at], keys.begin + i);
      if (is_marked) row[i] = -row[i];
    }
  }

  /// Scores become exp(f - m), the state's sums what these are divided by.
  void softmax(const PlainPanel& panel, float sink, const Scratch& scratch) const {
    const PanelState& state = scratch.state;
    std::fill_n(state.row_max, kernels_.lanes, sink);
    std::fill_n(state.row_sum, kernels_.lanes, sink == -kInfinity ? 0.0F : 1.0F);
    kernels_.softmax(scratch.scores, panel.sequence.seqlen_kv, num_vectors(panel),
                     std::numbers::log2e_v<float>, state, {});
  }

  void write_tiles(const PlainPanel& panel, const Scratch& scratch) const {
    const Sequence& s = panel.sequence;
    for (std::int64_t key = 0; key < s.seqlen_kv; key += kTileKeys) {
      const std::int64_t count = std::min(kTileKeys, s.seqlen_kv - key);
      const float* tile = scratch.scores + key * kernels_.lanes;
      for (std::int64_t lane = 0; lane < panel.num_rows; lane += kRowsAtOnce) {
        const std::int64_t num_rows = std::min(kRowsAtOnce, panel.num_rows - lane);
        kernels_.extract_rows(tile, {lane, num_rows}, count, scratch.probabilities, kTileKeys);
        for (std::int64_t i = 0; i < num_rows; ++i) {
          const float sum = scratch.state.row_sum[lane + i];
          float* row = scratch.probabilities + i * kTileKeys;
          if (drop_threshold_ > 0) mark_dropped(panel, lane + i, {key, count}, scratch, row);
          kernels_.store_row(row, sum == 0 ? 0.0F : 1 / sum, count, view_.dtype(), view_.stride(3),
                             place(panel, lane + i, key));
        }
      }
    }
    for (std::int64_t lane = 0; lane < panel.num_rows; ++lane) {
      const auto at = static_cast<std::size_t>(lane);
      clear(s, panel.q_head[at], panel.q_idx[at], s.seqlen_kv);
    }
  }

  /// Where the probability of this row and key is written.
  std::byte* place(const PlainPanel& panel, std::int64_t lane, std::int64_t key) const {
    const auto i = static_cast<std::size_t>(lane);
    const std::int64_t at = offset_of(panel.sequence, panel.q_head[i], panel.q_idx[i], key);
    return static_cast<std::byte*>(view_.mutable_data()) +
           at * static_cast<std::int64_t>(size_bytes(view_.dtype()));
  }

  // ---- the plain formula, in fp64 ----

  /// scores[key][lane] = scale q·k
  void multiply_plain(const PlainPanel& panel, float* scores) const {
    const auto head_dim = static_cast<std::size_t>(problem_.head_dim_qk);
    std::vector<std::vector<double>> queries;
    for (std::int64_t lane = 0; lane < panel.num_rows; ++lane)
      load_row(forward_.q, panel.place(lane), queries.emplace_back(head_dim));
    std::vector<double> key_row(head_dim);
    const Sequence& s = panel.sequence;
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      load_row(forward_.k, {s.batch_offset, s.kv_begin + key, panel.kv_head}, key_row);
      for (std::size_t lane = 0; lane < queries.size(); ++lane) {
        scores[static_cast<std::size_t>(key * kernels_.lanes) + lane] =
            static_cast<float>(problem_.softmax_scale * dot(queries[lane], key_row));
      }
    }
  }

  void write_row(const PlainPanel& panel, std::int64_t lane, const float* scores) const {
    const Sequence& s = panel.sequence;
    const std::int64_t q_head = panel.q_head[static_cast<std::size_t>(lane)];
    const std::int64_t q_idx = panel.q_idx[static_cast<std::size_t>(lane)];
    const auto score = [&](std::int64_t key) { return scores[key * kernels_.lanes + lane]; };
    const double sink = sink_of(q_head);
    double largest = sink;
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key)
      if (score(key) != -kInfinity) largest = largest_of(score(key), largest);
    double sum = sink_share(sink, largest);
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key)
      if (score(key) != -kInfinity) sum += std::exp(score(key) - largest);
    for (std::int64_t key = 0; key < s.seqlen_kv; ++key) {
      double p = 0;
      if (score(key) != -kInfinity) {
        p = std::exp(score(key) - largest) / sum;
        if (is_dropped(s, q_head, q_idx, key)) p = -p;
      }
      store(s, q_head, q_idx, key, p);
    }
    clear(s, q_head, q_idx, s.seqlen_kv);
  }

  double sink_of(std::int64_t q_head) const {
    const TensorView& sinks = forward_.sinks;
    return sinks ? static_cast<const float*>(sinks.data())[q_head * sinks.stride(0)] : -kInfinity;
  }

  static philox::Key key_of(const Dropout& dropout) {
    return philox::dropout_key(dropout.seed, dropout.offset);
  }

  bool is_dropped(const Sequence& s, std::int64_t q_head, std::int64_t q_idx,
                  std::int64_t key) const {
    return philox::random_word(dropout_key_, dropout_places_, s.index, q_head, q_idx, key) <
           drop_threshold_;
  }

  /// The columns of a row from `begin` on.
  void clear(const Sequence& s, std::int64_t q_head, std::int64_t row, std::int64_t begin) const {
    for (std::int64_t column = begin; column < view_.size(3); ++column)
      store(s, q_head, row, column, 0);
  }

  void store(const Sequence& s, std::int64_t q_head, std::int64_t row, std::int64_t column,
             double p) const {
    store_scalar(static_cast<std::byte*>(view_.mutable_data()), view_.dtype(),
                 offset_of(s, q_head, row, column), static_cast<float>(p));
  }

  std::int64_t offset_of(const Sequence& s, std::int64_t q_head, std::int64_t row,
                         std::int64_t column) const {
    return s.index * view_.stride(0) + q_head * view_.stride(1) + row * view_.stride(2) +
           column * view_.stride(3);
  }

  const ForwardProblem& problem_;
  const AttentionForward& forward_;
  const Rows q_, k_;
  const TensorView& view_;
  const PanelKernels& kernels_;
  Executor& executor_;
  const std::uint64_t drop_threshold_;  // p = 0: nothing is below
  const philox::Key dropout_key_;
  const philox::Places dropout_places_;
  const BoundProgram score_, mask_;
  std::vector<AlignedBytes> memory_{};  // of each worker, once it has begun
};

}  // namespace

void attention_probabilities(const ForwardProblem& problem, const AttentionProbabilities& args,
                             Executor& executor) {
  ProbabilitiesRun(problem, args, executor).run();
}

}  // namespace fovea::cpu
