#include "reference/plain_formula.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.hpp"
#include "problem/forward.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"

namespace fovea::reference {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr float kLeastNormal = 0x1p-126F;  // of f32 and bf16
/// Kernels take powers of 2 below -100 for 0, some with -99.5.
constexpr float kLeastWeight = 0x1p-99F;

float without_denormals(float value) { return std::fabs(value) < kLeastNormal ? 0 : value; }

/// The sum of three numbers of bf16, each of what those before it leave.
float sum_of_parts(float value) {
  constexpr int kParts = 3;
  if (!std::isfinite(value)) return value;
  float sum = 0;
  for (int part = 0; part < kParts; ++part)
    sum += without_denormals(static_cast<float>(bfloat16(value - sum)));
  return sum;
}

/// A tensor seen as [batch, row, head, dim], in the compute dtype.
class Input {
 public:
  Input(const TensorView& view, const Products& products) : view_(view), products_(products) {}
  float at(std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t dim) const {
    const int seq = view_.rank() == 3 ? 0 : 1;
    const std::int64_t batch_offset = view_.rank() == 3 ? 0 : batch * view_.stride(0);
    const std::int64_t offset = batch_offset + row * view_.stride(seq) +
                                head * view_.stride(seq + 1) + dim * view_.stride(seq + 2);
    return as_operand(static_cast<float>(element(view_, offset)), products_);
  }

 private:
  TensorView view_;
  Products products_;
};

struct Sequence {
  std::int64_t batch = 0, q_begin = 0, kv_begin = 0, seqlen_q = 0, seqlen_kv = 0;
};

class Plain {
 public:
  Plain(const AttentionForward& args, const Products& products)
      : args_(args),
        products_(products),
        q_(args.q, products),
        k_(args.k, products),
        v_(args.v, products),
        score_(args.score, Precision::f32),
        mask_(args.mask, Precision::f32) {}

  PlainResult run() {
    const bool is_packed = args_.q.rank() == 3;
    const int heads = is_packed ? 1 : 2;
    num_heads_q_ = args_.q.size(heads);
    total_q_ = args_.q.size(heads - 1);
    head_dim_v_ = args_.v.size(heads + 1);
    const std::int64_t head_rows = (is_packed ? 1 : args_.q.size(0)) * total_q_ * num_heads_q_;
    result_.out.assign(static_cast<std::size_t>(head_rows * head_dim_v_), 0);
    result_.lse.assign(static_cast<std::size_t>(head_rows), -kInfinity);
    result_.row_max = result_.lse;
    const std::int64_t count = is_packed ? args_.cu_seqlens_q.size(0) - 1 : args_.q.size(0);
    for (std::int64_t batch = 0; batch < count; ++batch) run_sequence(sequence(batch, is_packed));
    return std::move(result_);
  }

 private:
  Sequence sequence(std::int64_t batch, bool is_packed) const {
    if (!is_packed) return {batch, 0, 0, args_.q.size(1), args_.k.size(1)};
    const auto entry = [](const TensorView& cu_seqlens, std::int64_t i) {
      return static_cast<std::int64_t>(element(cu_seqlens, i * cu_seqlens.stride(0)));
    };
    const std::int64_t q_begin = entry(args_.cu_seqlens_q, batch);
    const std::int64_t kv_begin = entry(args_.cu_seqlens_kv, batch);
    return {batch, q_begin, kv_begin, entry(args_.cu_seqlens_q, batch + 1) - q_begin,
            entry(args_.cu_seqlens_kv, batch + 1) - kv_begin};
  }

  void run_sequence(const Sequence& s) {
    const int heads = args_.k.rank() == 3 ? 1 : 2;
    if (num_heads_q_ == 0) return;
    const std::int64_t group = num_heads_q_ / args_.k.size(heads);
    for (std::int64_t q_head = 0; q_head < num_heads_q_; ++q_head) {
      gather(s, q_head / group);
      for (std::int64_t q_idx = 0; q_idx < s.seqlen_q; ++q_idx) {
        run_row(s, {.batch = s.batch,
                    .q_head = q_head,
                    .kv_head = q_head / group,
                    .q_idx = q_idx,
                    .seqlen_q = s.seqlen_q,
                    .seqlen_kv = s.seqlen_kv});
      }
    }
  }

  void gather(const Sequence& s, std::int64_t kv_head) {
    const int dim = args_.k.rank() - 1;
    k_rows_.clear();
    v_rows_.clear();
    for (std::int64_t row = s.kv_begin; row < s.kv_begin + s.seqlen_kv; ++row) {
      for (std::int64_t d = 0; d < args_.k.size(dim); ++d)
        k_rows_.push_back(k_.at(s.batch, row, kv_head, d));
      for (std::int64_t d = 0; d < head_dim_v_; ++d)
        v_rows_.push_back(v_.at(s.batch, row, kv_head, d));
    }
  }

  void run_row(const Sequence& s, const Position& at) {
    const bool is_packed = args_.q.rank() == 3;
    const std::int64_t row = s.q_begin + at.q_idx;
    const std::int64_t batch = is_packed ? 0 : s.batch;
    const auto stat = static_cast<std::size_t>((batch * num_heads_q_ + at.q_head) * total_q_ + row);
    const auto out = static_cast<std::size_t>(
        ((batch * total_q_ + row) * num_heads_q_ + at.q_head) * head_dim_v_);
    const float row_max = fill_scores(s, at);
    const float sink =
        args_.sinks ? static_cast<float>(element(args_.sinks, at.q_head * args_.sinks.stride(0)))
                    : -kInfinity;
    const bool is_nan = std::isnan(row_max) || std::isnan(sink);
    const float largest = is_nan ? row_max + sink : std::max(row_max, sink);
    result_.row_max[stat] = row_max;
    if (largest == -kInfinity) return;
    float row_sum = sink == largest ? 1 : std::exp(sink - largest);
    count_score(sink);
    std::int64_t num_keys = 0;
    for (const float score : scores_) {
      count_score(score);
      num_keys += score == -kInfinity ? 0 : 1;
      row_sum += key_weight(score - largest);
    }
    result_.most_keys = std::max(result_.most_keys, num_keys);
    result_.lse[stat] = largest + std::log(row_sum);
    if (num_keys == 0) return;
    sum_values(at, largest, row_sum, result_.out.data() + out);
  }

  void count_score(float score) {
    if (std::isfinite(score))
      result_.largest_score = std::max<double>(result_.largest_score, std::fabs(score));
  }

  float fill_scores(const Sequence& s, Position at) {
    const std::int64_t head_dim = args_.q.size(args_.q.rank() - 1);
    const float scale = args_.softmax_scale.value_or(1 / std::sqrt(static_cast<float>(head_dim)));
    q_row_.clear();
    for (std::int64_t d = 0; d < head_dim; ++d) {
      q_row_.push_back(q_.at(s.batch, s.q_begin + at.q_idx, at.q_head, d));
    }
    scores_.assign(static_cast<std::size_t>(s.seqlen_kv), -kInfinity);
    float row_max = -kInfinity;
    for (at.kv_idx = 0; at.kv_idx < s.seqlen_kv; ++at.kv_idx) {
      at.score = 0;
      if (mask_(at) == 0) continue;
      const float* k_row = k_rows_.data() + at.kv_idx * head_dim;
      float product = 0;
      for (std::size_t d = 0; d < q_row_.size(); ++d) product += q_row_[d] * k_row[d];
      at.score = product * scale;
      const auto score = static_cast<float>(score_(at));
      scores_[static_cast<std::size_t>(at.kv_idx)] = score;
      if (score > row_max || std::isnan(score)) row_max = score;
    }
    return row_max;
  }

  void sum_values(const Position& at, float largest, float row_sum, double* out) {
    const Dropout dropout = dropout_of(args_);
    const philox::Key key = philox::dropout_key(dropout.seed, dropout.offset);
    const philox::Places places = dropout_places_of(args_);
    const std::uint64_t threshold = philox::drop_threshold(args_.dropout.p);
    const float kept_scale = args_.dropout.p < 1 ? 1 / (1 - args_.dropout.p) : 0;
    sums_.assign(static_cast<std::size_t>(head_dim_v_), 0);
    averages_.assign(static_cast<std::size_t>(head_dim_v_), 0);
    float largest_value = 0;
    float largest_weight = 0;
    for (std::int64_t kv_idx = 0; kv_idx < at.seqlen_kv; ++kv_idx) {
      const float score = scores_[static_cast<std::size_t>(kv_idx)];
      if (score == -kInfinity) continue;
      largest_weight = std::max(largest_weight, key_weight(score - largest));
      const bool keeps =
          args_.dropout.p == 0 ||
          philox::random_word(key, places, at.batch, at.q_head, at.q_idx, kv_idx) >= threshold;
      if (!keeps) continue;
      const float weight = as_operand(key_weight(score - largest), products_);
      const float* v_row = v_rows_.data() + kv_idx * head_dim_v_;
      for (std::size_t d = 0; d < sums_.size(); ++d) {
        sums_[d] += weight * v_row[d];
        averages_[d] += weight * std::fabs(v_row[d]);
        largest_value = std::max(largest_value, std::isfinite(v_row[d]) ? std::fabs(v_row[d]) : 0);
      }
    }
    for (std::size_t d = 0; d < sums_.size(); ++d) {
      out[d] = sums_[d] / row_sum * kept_scale;
      const double average = averages_[d] / row_sum * kept_scale;
      if (std::isfinite(average))
        result_.largest_average = std::max(result_.largest_average, average);
    }
    const double normal_weight = double{largest_weight} / row_sum;
    if (std::isfinite(normal_weight))
      result_.largest_weight = std::max(result_.largest_weight, normal_weight);
    const double kept_value = double{largest_value} * kept_scale;
    result_.largest_value = std::max(result_.largest_value, kept_value);
  }

  const AttentionForward& args_;
  Products products_;
  Input q_, k_, v_;
  Evaluator score_, mask_;
  std::int64_t num_heads_q_ = 0, total_q_ = 0, head_dim_v_ = 0;
  std::vector<float> k_rows_, v_rows_, q_row_, scores_, sums_, averages_;
  PlainResult result_;
};

}  // namespace

float key_weight(float exponent) {
  const float weight = std::exp(exponent);
  return weight < kLeastWeight ? 0 : weight;
}

float as_operand(float value, const Products& products) {
  if (products.dtype == ComputeDtype::bf16)
    return without_denormals(static_cast<float>(bfloat16(value)));
  return products.loses_denormals ? sum_of_parts(value) : value;
}

PlainResult plain_formula(const AttentionForward& args, const Products& products) {
  return Plain(args, products).run();
}

}  // namespace fovea::reference
