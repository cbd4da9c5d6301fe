// The plain formula: scores of a few rows against all keys of their sequence, programs on them, then a row at a time
//   p_j = exp(f_j - m) / (exp(sink - m) + Σ exp(f_i - m)),      m the largest of f and the sink.
//
// A task writes the rows [begin, begin + lanes) of one query head of one sequence, in all their columns: no element is
// written twice, and none is left, behind the end of a packed sequence neither.
#include "cpu/attention_probabilities.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
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

/// What a task computes in.
struct Scratch {
  float* scores = nullptr;  // [seqlen_kv][lanes]
  std::byte* program = nullptr;
};

class ProbabilitiesRun {
 public:
  ProbabilitiesRun(const ForwardProblem& problem, const AttentionProbabilities& args,
                   Executor& executor)
      : problem_(problem),
        forward_(args.forward),
        view_(args.probabilities),
        kernels_(best_f32_kernels()),
        executor_(executor),
        drop_threshold_(philox::drop_threshold(args.forward.dropout.p)),
        dropout_key_(key_of(dropout_of(args.forward))),
        dropout_places_(dropout_places_of(args.forward)),
        score_(formula_of(args.forward.score)),
        mask_(formula_of(args.forward.mask)) {}

  void run() const {
    const std::int64_t panels = ceil_div(view_.size(2), kernels_.lanes);
    const std::int64_t heads = problem_.num_heads_q;
    run_tasks(executor_, problem_.num_sequences * heads * panels,
              [&](int /*worker*/, std::int64_t task) {
                const Sequence s = sequence_at(problem_, forward_, task / panels / heads);
                write_rows(s, task / panels % heads, task % panels * kernels_.lanes);
              });
  }

 private:
  void write_rows(const Sequence& s, std::int64_t q_head, std::int64_t begin) const {
    const std::int64_t end = std::min(begin + kernels_.lanes, view_.size(2));
    const std::int64_t count = std::clamp<std::int64_t>(s.seqlen_q - begin, 0, end - begin);
    if (count > 0) write_panel(s, q_head, begin, count);
    for (std::int64_t row = begin + count; row < end; ++row) clear(s, q_head, row, 0);
  }

  void write_panel(const Sequence& s, std::int64_t q_head, std::int64_t begin,
                   std::int64_t count) const {
    const std::int64_t group = problem_.group;
    const PlainPanel panel = plain_panel(
        s, {q_head / group, q_head % group * s.seqlen_q + begin, count}, group, kernels_.lanes);
    Scratch scratch;
    const auto carve = [&](Carver carver) {
      scratch.scores = carver.take<float>(static_cast<std::size_t>(s.seqlen_kv * kernels_.lanes));
      scratch.program = carver.take<std::byte>(
          std::max(plain_scratch_bytes(score_, kernels_), plain_scratch_bytes(mask_, kernels_)));
      return carver.used();
    };
    const AlignedBytes memory(carve(Carver(nullptr)));
    carve(Carver(memory.data()));
    multiply(panel, scratch.scores);
    run_score(score_, kernels_, panel, scratch.scores, scratch.program);
    run_mask(mask_, kernels_, panel, scratch.scores, scratch.program);
    for (std::int64_t lane = 0; lane < count; ++lane) write_row(panel, lane, scratch.scores);
  }

  /// scores[key][lane] = scale q·k
  void multiply(const PlainPanel& panel, float* scores) const {
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
    const std::int64_t at = s.index * view_.stride(0) + q_head * view_.stride(1) +
                            row * view_.stride(2) + column * view_.stride(3);
    store_scalar(static_cast<std::byte*>(view_.mutable_data()), view_.dtype(), at,
                 static_cast<float>(p));
  }

  const ForwardProblem& problem_;
  const AttentionForward& forward_;
  const TensorView& view_;
  const PanelKernels& kernels_;
  Executor& executor_;
  const std::uint64_t drop_threshold_;  // p = 0: nothing is below
  const philox::Key dropout_key_;
  const philox::Places dropout_places_;
  const BoundProgram score_, mask_;
};

}  // namespace

void attention_probabilities(const ForwardProblem& problem, const AttentionProbabilities& args,
                             Executor& executor) {
  ProbabilitiesRun(problem, args, executor).run();
}

}  // namespace fovea::cpu
