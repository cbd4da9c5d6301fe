#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.hpp"
#include "reference/attention_forward.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"

namespace fovea::tools {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The axes of a dense or packed tensor by name.
struct Axes {
  std::int64_t batch_stride, row_stride, head_stride, dim_stride;
  std::int64_t num_rows, num_heads, head_dim;

  explicit Axes(const TensorView& view) {
    const int seq = view.rank() == 3 ? 0 : 1;
    batch_stride = view.rank() == 3 ? 0 : view.stride(0);
    row_stride = view.stride(seq);
    head_stride = view.stride(seq + 1);
    dim_stride = view.stride(seq + 2);
    num_rows = view.size(seq);
    num_heads = view.size(seq + 1);
    head_dim = view.size(seq + 2);
  }
};

/// Results of the plain formula, in the layouts of reference::ForwardResult, and what the floors need.
struct Plain {
  std::vector<double> out, lse;
  double largest_score = 0;    // |score| over visible keys
  double largest_average = 0;  // Σ weight |v| over elements of out
};

/// The formula as a person would code it: fp32 sums in plain order over inputs of `dtype`, no tiles, no rescaling.
class PlainForward {
 public:
  PlainForward(const AttentionForward& args, ComputeDtype dtype)
      : args_(args),
        dtype_(dtype),
        q_(args.q),
        k_(args.k),
        v_(args.v),
        score_(args.score, reference::Precision::f32),
        mask_(args.mask, reference::Precision::f32),
        softmax_scale_(
            args.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(q_.head_dim)))) {}

  Plain run() {
    const bool is_packed = args_.q.rank() == 3;
    const std::int64_t num_batches = is_packed ? 1 : args_.q.size(0);
    const auto num_head_rows = static_cast<std::size_t>(num_batches * q_.num_rows * q_.num_heads);
    plain_.out.assign(num_head_rows * static_cast<std::size_t>(v_.head_dim), 0);
    plain_.lse.assign(num_head_rows, -kInfinity);
    const std::int64_t count = is_packed ? args_.cu_seqlens_q.size(0) - 1 : args_.q.size(0);
    for (std::int64_t batch = 0; batch < count; ++batch) run_sequence(batch, is_packed);
    return std::move(plain_);
  }

 private:
  static std::int64_t entry(const TensorView& cu_seqlens, std::int64_t i) {
    return static_cast<std::int64_t>(reference::element(cu_seqlens, i * cu_seqlens.stride(0)));
  }

  void run_sequence(std::int64_t batch, bool is_packed) {
    memory_batch_ = is_packed ? 0 : batch;
    q_begin_ = is_packed ? entry(args_.cu_seqlens_q, batch) : 0;
    const std::int64_t kv_begin = is_packed ? entry(args_.cu_seqlens_kv, batch) : 0;
    const std::int64_t seqlen_q =
        is_packed ? entry(args_.cu_seqlens_q, batch + 1) - q_begin_ : q_.num_rows;
    const std::int64_t seqlen_kv =
        is_packed ? entry(args_.cu_seqlens_kv, batch + 1) - kv_begin : k_.num_rows;
    for (std::int64_t q_head = 0; q_head < q_.num_heads; ++q_head) {
      const std::int64_t kv_head = q_head / (q_.num_heads / k_.num_heads);
      k_rows_ = gather(args_.k, k_, kv_begin, seqlen_kv, kv_head);
      v_rows_ = gather(args_.v, v_, kv_begin, seqlen_kv, kv_head);
      q_rows_ = gather(args_.q, q_, q_begin_, seqlen_q, q_head);
      for (std::int64_t q_idx = 0; q_idx < seqlen_q; ++q_idx) {
        run_row({.batch = batch,
                 .q_head = q_head,
                 .kv_head = kv_head,
                 .q_idx = q_idx,
                 .seqlen_q = seqlen_q,
                 .seqlen_kv = seqlen_kv});
      }
    }
  }

  std::vector<float> gather(const TensorView& view, const Axes& axes, std::int64_t begin,
                            std::int64_t rows, std::int64_t head) const {
    std::vector<float> matrix;
    matrix.reserve(static_cast<std::size_t>(rows * axes.head_dim));
    for (std::int64_t row = begin; row < begin + rows; ++row) {
      for (std::int64_t dim = 0; dim < axes.head_dim; ++dim) {
        const std::int64_t offset = memory_batch_ * axes.batch_stride + row * axes.row_stride +
                                    head * axes.head_stride + dim * axes.dim_stride;
        matrix.push_back(rounded(static_cast<float>(reference::element(view, offset)), dtype_));
      }
    }
    return matrix;
  }

  void run_row(const reference::Position& at) {
    const std::int64_t row = q_begin_ + at.q_idx;
    const auto stat =
        static_cast<std::size_t>((memory_batch_ * q_.num_heads + at.q_head) * q_.num_rows + row);
    const auto out = static_cast<std::size_t>(
        ((memory_batch_ * q_.num_rows + row) * q_.num_heads + at.q_head) * v_.head_dim);
    const float row_max = fill_scores(at);
    const float sink =
        args_.sinks
            ? static_cast<float>(reference::element(args_.sinks, at.q_head * args_.sinks.stride(0)))
            : -kInfinity;
    const float largest = std::isnan(row_max) ? row_max : std::max(row_max, sink);
    if (largest == -kInfinity) return;
    float row_sum = std::exp(sink - largest);
    for (const float score : scores_) {
      if (std::isfinite(score))
        plain_.largest_score = std::max<double>(plain_.largest_score, std::fabs(score));
      row_sum += std::exp(score - largest);
    }
    plain_.lse[stat] = largest + std::log(row_sum);
    sum_values(at, largest, row_sum, plain_.out.data() + out);
  }

  float fill_scores(reference::Position at) {
    const float* q_row = q_rows_.data() + at.q_idx * q_.head_dim;
    scores_.assign(static_cast<std::size_t>(at.seqlen_kv), -kInfinity);
    float row_max = -kInfinity;
    for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
      at.score = 0;
      if (mask_(at) == 0) continue;
      const float* k_row = k_rows_.data() + at.kv_idx * q_.head_dim;
      float product = 0;
      for (std::int64_t dim = 0; dim < q_.head_dim; ++dim) product += q_row[dim] * k_row[dim];
      at.score = product * softmax_scale_;
      const auto score = static_cast<float>(score_(at));
      scores_[static_cast<std::size_t>(at.kv_idx)] = score;
      if (score > row_max || std::isnan(score)) row_max = score;
    }
    return row_max;
  }

  bool is_dropped(const reference::Position& at, std::int64_t kv_idx) const {
    if (args_.dropout.p == 0) return false;
    const philox::Key key = philox::dropout_key(args_.dropout.seed, args_.dropout.offset);
    return philox::random_word(key, at.batch, at.q_head, at.q_idx, kv_idx) <
           philox::drop_threshold(args_.dropout.p);
  }

  void sum_values(const reference::Position& at, float largest, float row_sum, double* out) {
    const auto head_dim = static_cast<std::size_t>(v_.head_dim);
    sums_.assign(head_dim, 0);
    averages_.assign(head_dim, 0);
    for (std::int64_t kv_idx = 0; kv_idx < at.seqlen_kv; ++kv_idx) {
      const float score = scores_[static_cast<std::size_t>(kv_idx)];
      if (score == -kInfinity || is_dropped(at, kv_idx)) continue;
      const float weight = rounded(std::exp(score - largest), dtype_);
      const float* v_row = v_rows_.data() + kv_idx * v_.head_dim;
      for (std::size_t dim = 0; dim < head_dim; ++dim) {
        sums_[dim] += weight * v_row[dim];
        averages_[dim] += weight * std::fabs(v_row[dim]);
      }
    }
    const float kept = args_.dropout.p < 1 ? 1 / (1 - args_.dropout.p) : 0;
    for (std::size_t dim = 0; dim < head_dim; ++dim) {
      out[dim] = sums_[dim] / row_sum * kept;
      const double average = averages_[dim] / row_sum * kept;
      if (std::isfinite(average))
        plain_.largest_average = std::max(plain_.largest_average, average);
    }
  }

  const AttentionForward& args_;
  ComputeDtype dtype_;
  Axes q_, k_, v_;
  reference::Evaluator score_, mask_;
  float softmax_scale_;
  std::int64_t memory_batch_ = 0, q_begin_ = 0;
  std::vector<float> q_rows_, k_rows_, v_rows_, scores_, sums_, averages_;
  Plain plain_;
};

}  // namespace

CheckResult check_forward(const AttentionForward& args, ComputeDtype compute_dtype) {
  const reference::ForwardResult expected = reference::attention_forward(args);
  const Plain plain = PlainForward(args, compute_dtype).run();
  const double score_floor = floor_of_scores(plain.largest_score);
  const double out_floor =
      (rounding(dtype_of_products(compute_dtype), 1) + score_floor) * plain.largest_average;
  const std::vector<double> out = reference::elements(args.out);
  const std::vector<double> lse = reference::elements(args.lse);
  return {.out = compare({out, expected.out, plain.out}, args.out.dtype(), out_floor),
          .lse = compare({lse, expected.lse, plain.lse}, Dtype::f32, score_floor)};
}

}  // namespace fovea::tools
