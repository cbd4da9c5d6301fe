#include "reference/attention_forward.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/philox.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"

namespace fovea::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Shape {
  std::int64_t num_heads_q = 0, num_heads_kv = 0;
  std::int64_t head_dim_qk = 0, head_dim_v = 0;
};

/// One sequence: a batch entry of a dense tensor, or the rows [begin, begin + seqlen) of a packed
/// one.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t q_begin = 0, seqlen_q = 0;
  std::int64_t kv_begin = 0, seqlen_kv = 0;
};

bool is_packed(const AttentionForward& args) { return args.q.rank() == 3; }

Shape shape_of(const AttentionForward& args) {
  const int heads = is_packed(args) ? 1 : 2;
  return {.num_heads_q = args.q.size(heads),
          .num_heads_kv = args.k.size(heads),
          .head_dim_qk = args.q.size(heads + 1),
          .head_dim_v = args.v.size(heads + 1)};
}

std::vector<Sequence> sequences_of(const AttentionForward& args) {
  std::vector<Sequence> sequences;
  if (!is_packed(args)) {
    for (std::int64_t batch = 0; batch < args.q.size(0); ++batch) {
      sequences.push_back(
          {.batch = batch, .seqlen_q = args.q.size(1), .seqlen_kv = args.k.size(1)});
    }
    return sequences;
  }
  const auto entry = [](const TensorView& cu_seqlens, std::int64_t i) {
    return static_cast<std::int64_t>(element(cu_seqlens, i * cu_seqlens.stride(0)));
  };
  for (std::int64_t i = 0; i + 1 < args.cu_seqlens_q.size(0); ++i) {
    const std::int64_t q_begin = entry(args.cu_seqlens_q, i);
    const std::int64_t kv_begin = entry(args.cu_seqlens_kv, i);
    sequences.push_back({.batch = i,
                         .q_begin = q_begin,
                         .seqlen_q = entry(args.cu_seqlens_q, i + 1) - q_begin,
                         .kv_begin = kv_begin,
                         .seqlen_kv = entry(args.cu_seqlens_kv, i + 1) - kv_begin});
  }
  return sequences;
}

/// The rows [begin, begin + rows) of one head of q, k or v, as a row-major [rows, head_dim] matrix.
struct Rows {
  std::int64_t batch = 0, begin = 0, rows = 0, head = 0;
};
std::vector<double> gather(const TensorView& view, const Rows& which) {
  const int seq = view.rank() == 3 ? 0 : 1;
  const std::int64_t batch_offset = view.rank() == 3 ? 0 : which.batch * view.stride(0);
  const std::int64_t head_dim = view.size(seq + 2);
  std::vector<double> matrix;
  matrix.reserve(static_cast<std::size_t>(which.rows * head_dim));
  for (std::int64_t row = which.begin; row < which.begin + which.rows; ++row) {
    for (std::int64_t dim = 0; dim < head_dim; ++dim) {
      matrix.push_back(element(view, batch_offset + row * view.stride(seq) +
                                         which.head * view.stride(seq + 1) +
                                         dim * view.stride(seq + 2)));
    }
  }
  return matrix;
}

/// Where a row's results go: out [head_dim_v], and one element each of lse and row_max.
struct RowResult {
  std::span<double> out;
  double& lse;
  double& row_max;
};

/// Attention of one call, a row at a time. The four passes over a row's keys are the methods below,
/// in order.
class Forward {
 public:
  explicit Forward(const AttentionForward& args)
      : args_(args),
        shape_(shape_of(args)),
        score_(args.score),
        mask_(args.mask),
        softmax_scale_(args.softmax_scale
                           ? *args.softmax_scale
                           : 1 / std::sqrt(static_cast<double>(shape_.head_dim_qk))) {}

  ForwardResult run() {
    const std::int64_t num_rows =
        is_packed(args_) ? args_.q.size(0) : args_.q.size(0) * args_.q.size(1);
    const auto num_head_rows = static_cast<std::size_t>(num_rows * shape_.num_heads_q);
    ForwardResult result;
    result.out.assign(num_head_rows * static_cast<std::size_t>(shape_.head_dim_v), 0);
    result.lse.assign(num_head_rows, -kInfinity);
    result.row_max.assign(num_head_rows, -kInfinity);
    for (const Sequence& sequence : sequences_of(args_)) {
      for (std::int64_t q_head = 0; q_head < shape_.num_heads_q; ++q_head) {
        run_head(sequence, q_head, result);
      }
    }
    return result;
  }

 private:
  void run_head(const Sequence& s, std::int64_t q_head, ForwardResult& result) {
    const std::int64_t kv_head = q_head / (shape_.num_heads_q / shape_.num_heads_kv);
    const Rows keys{.batch = s.batch, .begin = s.kv_begin, .rows = s.seqlen_kv, .head = kv_head};
    k_ = gather(args_.k, keys);
    v_ = gather(args_.v, keys);
    const std::vector<double> q =
        gather(args_.q, {.batch = s.batch, .begin = s.q_begin, .rows = s.seqlen_q, .head = q_head});
    for (std::int64_t q_idx = 0; q_idx < s.seqlen_q; ++q_idx) {
      const Position at{.score = 0,
                        .batch = s.batch,
                        .q_head = q_head,
                        .kv_head = kv_head,
                        .q_idx = q_idx,
                        .kv_idx = 0,
                        .seqlen_q = s.seqlen_q,
                        .seqlen_kv = s.seqlen_kv};
      const double* q_row = q.data() + q_idx * shape_.head_dim_qk;
      run_row(at, q_row, row_of(s, q_head, q_idx, result));
    }
  }

  RowResult row_of(const Sequence& s, std::int64_t q_head, std::int64_t q_idx,
                   ForwardResult& result) const {
    const std::int64_t seqlen = args_.q.size(is_packed(args_) ? 0 : 1);
    const std::int64_t row = is_packed(args_) ? s.q_begin + q_idx : q_idx;
    const std::int64_t batch = is_packed(args_) ? 0 : s.batch;
    const auto out = static_cast<std::size_t>(
        ((batch * seqlen + row) * shape_.num_heads_q + q_head) * shape_.head_dim_v);
    const auto stat =
        static_cast<std::size_t>((batch * shape_.num_heads_q + q_head) * seqlen + row);
    return {.out = std::span(result.out).subspan(out, static_cast<std::size_t>(shape_.head_dim_v)),
            .lse = result.lse[stat],
            .row_max = result.row_max[stat]};
  }

  void run_row(const Position& at, const double* q_row, const RowResult& result) {
    compute_scores(at, q_row);
    result.row_max = largest_score();
    result.lse = normalise(at.q_head, result.row_max);
    drop(at);
    sum_values(result.out);
  }

  /// Pass 1: scores_[kv_idx], -inf where the key is hidden. What the mask hides is not even
  /// multiplied.
  void compute_scores(Position at, const double* q_row) {
    scores_.assign(static_cast<std::size_t>(at.seqlen_kv), -kInfinity);
    for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
      at.score = 0;
      if (mask_(at) == 0) continue;
      const double* k_row = k_.data() + at.kv_idx * shape_.head_dim_qk;
      double product = 0;
      for (std::int64_t dim = 0; dim < shape_.head_dim_qk; ++dim)
        product += q_row[dim] * k_row[dim];
      at.score = product * softmax_scale_;
      scores_[static_cast<std::size_t>(at.kv_idx)] = score_(at);
    }
  }

  /// Pass 2: -inf where no key is visible; a NaN in sight wins over every number.
  double largest_score() const {
    double largest = -kInfinity;
    for (const double score : scores_) {
      if (score > largest || std::isnan(score)) largest = score;
    }
    return largest;
  }

  /// Pass 3: weights_ = exp(score) / (exp(sink) + Σ exp(score)), with the largest exponent taken
  /// out; returns the log of the denominator. A row with neither key nor sink has no weight and lse
  /// -inf.
  double normalise(std::int64_t q_head, double row_max) {
    const double sink =
        args_.sinks ? element(args_.sinks, q_head * args_.sinks.stride(0)) : -kInfinity;
    const double largest = std::isnan(row_max) ? row_max : std::max(row_max, sink);
    weights_.assign(scores_.size(), 0);
    if (largest == -kInfinity) return -kInfinity;
    double sum = std::exp(sink - largest);
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      weights_[i] = std::exp(scores_[i] - largest);
      sum += weights_[i];
    }
    for (double& weight : weights_) weight /= sum;
    return largest + std::log(sum);
  }

  /// Between pass 3 and 4: dropout after the softmax, so lse does not know of it.
  void drop(const Position& at) {
    if (args_.dropout.p == 0) return;
    const philox::Key key = philox::dropout_key(args_.dropout.seed, args_.dropout.offset);
    const std::uint64_t threshold = philox::drop_threshold(args_.dropout.p);
    for (std::int64_t kv_idx = 0; kv_idx < at.seqlen_kv; ++kv_idx) {
      double& weight = weights_[static_cast<std::size_t>(kv_idx)];
      const bool keeps =
          philox::random_word(key, at.batch, at.q_head, at.q_idx, kv_idx) >= threshold;
      weight = keeps ? weight / (1 - static_cast<double>(args_.dropout.p)) : 0 * weight;
    }
  }

  /// Pass 4: out = Σ weight · v over visible keys, so NaN and Inf in hidden values have no effect.
  void sum_values(std::span<double> out) const {
    for (std::size_t kv_idx = 0; kv_idx < scores_.size(); ++kv_idx) {
      if (scores_[kv_idx] == -kInfinity) continue;
      for (std::size_t dim = 0; dim < out.size(); ++dim) {
        out[dim] += weights_[kv_idx] * v_[kv_idx * out.size() + dim];
      }
    }
  }

  const AttentionForward& args_;
  Shape shape_;
  Evaluator score_, mask_;
  double softmax_scale_;
  std::vector<double> k_, v_;             // of the sequence and head at work: [seqlen_kv, head_dim]
  std::vector<double> scores_, weights_;  // of the row at work: [seqlen_kv]
};

}  // namespace

ForwardResult attention_forward(const AttentionForward& args) { return Forward(args).run(); }

}  // namespace fovea::reference
