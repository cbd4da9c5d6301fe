#include "reference/plain_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "core/philox.hpp"
#include "problem/forward.hpp"
#include "reference/element.hpp"
#include "reference/evaluate.hpp"
#include "reference/query_rows.hpp"

namespace fovea::reference {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float rounded(float value, Dtype dtype) {
  switch (dtype) {
    case Dtype::f16:
      return static_cast<float>(float16(value));
    case Dtype::bf16:
      return static_cast<float>(bfloat16(value));
    default:
      return value;
  }
}

/// A tensor [batch, seqlen, heads, dim] or [total, heads, dim] in row-major fp32.
class Rows {
 public:
  explicit Rows(const TensorSpec& spec) : Rows(std::vector<double>(), spec, Dtype::f32) {}
  /// Rounded to `dtype`; zeros where the tensor is not given.
  Rows(const TensorView& view, const TensorSpec& spec, Dtype dtype = Dtype::f32)
      : Rows(view ? elements(view) : std::vector<double>(), spec, dtype) {}
  Rows(const std::vector<double>& values, const TensorSpec& spec, Dtype dtype)
      : values_(static_cast<std::size_t>(spec.num_elements())) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values_[i] = rounded(static_cast<float>(values[i]), dtype);
    const auto last = static_cast<std::size_t>(spec.rank) - 1;
    seqlen_ = spec.shape[last - 2];
    heads_ = spec.shape[last - 1];
    dim_ = spec.shape[last];
  }

  Rows as_operands(const Products& products) && {
    for (float& value : values_) value = as_operand(value, products);
    return std::move(*this);
  }

  std::span<float> operator[](const RowIndex& at) {
    const std::int64_t row = (at.batch * seqlen_ + at.row) * heads_ + at.head;
    return std::span(values_).subspan(static_cast<std::size_t>(row * dim_),
                                      static_cast<std::size_t>(dim_));
  }
  std::vector<double> values(float factor = 1) const {
    std::vector<double> result;
    for (const float value : values_) result.push_back(value * factor);
    return result;
  }

 private:
  std::int64_t seqlen_ = 0, heads_ = 0, dim_ = 0;
  std::vector<float> values_;
};

float dot(std::span<const float> a, std::span<const float> b) {
  float sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

float absolute_dot(std::span<const float> a, std::span<const float> b) {
  float sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::fabs(a[i] * b[i]);
  return sum;
}

void add(std::span<float> sum, float factor, std::span<const float> row) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * row[i];
}

void add_absolute(std::span<float> sum, float factor, std::span<const float> row) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += std::fabs(factor * row[i]);
}

struct Key {
  Position at;
  float score = 0;
  float kept = 1;
};

/// Visible keys of a row and their scores, in fp32.
class Scores {
 public:
  explicit Scores(const AttentionForward& args)
      : score_(args.score, Precision::f32),
        mask_(args.mask, Precision::f32),
        dropout_(dropout_of(args)),
        dropout_places_(dropout_places_of(args)),
        scale_(args.softmax_scale.value_or(
            1 / std::sqrt(static_cast<float>(args.q.size(args.q.rank() - 1))))) {}

  float scale() const { return scale_; }
  Evaluator& program() { return score_; }
  double largest() const { return largest_; }

  std::vector<Key> operator()(const QueryRow& row, std::span<const float> q, Rows& k) {
    std::vector<Key> keys;
    Position at = row.at;
    for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
      at.score = 0;
      if (mask_(at) == 0) continue;
      at.score = dot(q, k[row.key(at.kv_idx)]) * scale_;
      const auto score = static_cast<float>(score_(at));
      if (score == -kInfinity) continue;
      if (std::isfinite(score)) largest_ = std::max<double>(largest_, std::fabs(score));
      keys.push_back({.at = at, .score = score, .kept = kept(at)});
    }
    return keys;
  }

 private:
  float kept(const Position& at) const {
    if (dropout_.p == 0) return 1;
    const philox::Key key = philox::dropout_key(dropout_.seed, dropout_.offset);
    const bool keeps = philox::random_word(key, dropout_places_, at.batch, at.q_head, at.q_idx,
                                           at.kv_idx) >= philox::drop_threshold(dropout_.p);
    return keeps ? 1 / (1 - dropout_.p) : 0;
  }

  Evaluator score_, mask_;
  Dropout dropout_;
  philox::Places dropout_places_;
  float scale_;
  double largest_ = 0;
};

/// The same sums four times: of the values, and of what their errors are relative to.
struct Sums {
  Rows dq, dk, dv;
  std::vector<float> dsinks;
  SlotValues dcaptured;

  explicit Sums(const AttentionForward& args, SlotValues captured)
      : dq(args.q.spec()),
        dk(args.k.spec()),
        dv(args.v.spec()),
        dsinks(args.sinks ? num_heads_q(args) : 0),
        dcaptured(std::move(captured)) {}

  BackwardResult result(float scale, const std::vector<Slot>& slots) const {
    BackwardResult result{.dq = dq.values(scale),
                          .dk = dk.values(scale),
                          .dv = dv.values(),
                          .dsinks = {dsinks.begin(), dsinks.end()},
                          .dcaptured = {}};
    for (std::size_t i = 0; i < slots.size(); ++i) result.dcaptured[slots[i].name] = dcaptured[i];
    return result;
  }
};

class Backward {
 public:
  Backward(const AttentionBackward& args, const Products& products)
      : args_(args),
        forward_(args.forward),
        products_(products),
        plain_(plain_formula(forward_, products)),
        scores_(forward_),
        q_(Rows(forward_.q, forward_.q.spec()).as_operands(products)),
        k_(Rows(forward_.k, forward_.k.spec()).as_operands(products)),
        v_(Rows(forward_.v, forward_.v.spec()).as_operands(products)),
        dout_(args.dout, args.dout.spec()),
        dout_rounded_(Rows(args.dout, args.dout.spec()).as_operands(products)),
        out_(plain_.out, args.dout.spec(), forward_.out.dtype()),
        values_(forward_, scores_.program().zeros()),
        by_scores_(values_),
        by_products_(values_),
        by_out_(values_) {}

  PlainBackward run() {
    const std::vector<double> dlse =
        args_.dlse ? elements(args_.dlse) : std::vector<double>(plain_.lse.size());
    const std::vector<QueryRow> rows = query_rows(forward_);
    for (const QueryRow& row : rows) run_row(row, static_cast<float>(dlse[row.statistic]));
    const float scale = scores_.scale();
    const std::vector<Slot>& slots = scores_.program().slots();
    return {.values = values_.result(scale, slots),
            .by_scores = by_scores_.result(scale, slots),
            .by_products = by_products_.result(scale, slots),
            .by_out = by_out_.result(scale, slots),
            .largest_score = scores_.largest()};
  }

 private:
  struct Row {
    std::span<const float> q, dout, dout_rounded;
    float lse = 0;
    float delta = 0, delta_by_scores = 0, delta_by_out = 0;
  };

  void run_row(const QueryRow& at, float dlse) {
    const std::vector<Key> keys = scores_(at, q_[at.query], k_);
    Row row{.q = q_[at.query],
            .dout = dout_[at.query],
            .dout_rounded = dout_rounded_[at.query],
            .lse = static_cast<float>(plain_.lse[at.statistic]),
            .delta = -dlse,
            .delta_by_scores = std::fabs(dlse)};
    if (!keys.empty()) {  // else out is a constant, and dout may be anything
      row.delta = dot(row.dout, out_[at.query]) - dlse;
      row.delta_by_out = absolute_dot(row.dout, out_[at.query]);
      row.delta_by_scores += row.delta_by_out;
    }
    for (const Key& key : keys) add_key(at, row, key);
    if (forward_.sinks && row.lse != -kInfinity) add_sink(at, row);
  }

  void add_key(const QueryRow& at, const Row& row, const Key& key) {
    const RowIndex kv = at.key(key.at.kv_idx);
    const float probability = key_weight(key.score - row.lse);
    const float weight = as_operand(key.kept * probability, products_);
    const float dp = key.kept * dot(row.dout_rounded, v_[kv]);
    const float ds = probability * (dp - row.delta);
    scores_.program()(key.at);
    const auto dz = static_cast<float>(scores_.program().pull_back(ds, values_.dcaptured));
    add(values_.dq[at.query], as_operand(dz, products_), k_[kv]);
    add(values_.dk[kv], as_operand(dz, products_), row.q);
    add(values_.dv[kv], weight, row.dout_rounded);

    const auto add_magnitude = [&](Sums& sums, float of_ds, float of_weight) {
      const auto of_dz =
          static_cast<float>(std::fabs(scores_.program().pull_back(of_ds, sums.dcaptured)));
      add_absolute(sums.dq[at.query], of_dz, k_[kv]);
      add_absolute(sums.dk[kv], of_dz, row.q);
      add_absolute(sums.dv[kv], of_weight, row.dout_rounded);
    };
    const float absolute_dp = key.kept * absolute_dot(row.dout_rounded, v_[kv]);
    add_magnitude(by_scores_, probability * (absolute_dp + row.delta_by_scores), weight);
    add_magnitude(by_products_, std::fabs(ds) + probability * absolute_dp, weight);
    add_magnitude(by_out_, probability * row.delta_by_out, 0);
  }

  void add_sink(const QueryRow& at, const Row& row) {
    const auto head = static_cast<std::size_t>(at.at.q_head);
    const TensorView& sinks = forward_.sinks;
    const auto sink = static_cast<float>(element(sinks, at.at.q_head * sinks.stride(0)));
    const float probability = std::exp(sink - row.lse);
    values_.dsinks[head] -= probability * row.delta;
    by_scores_.dsinks[head] += probability * row.delta_by_scores;
    by_out_.dsinks[head] += probability * row.delta_by_out;
  }

  const AttentionBackward& args_;
  const AttentionForward& forward_;
  Products products_;
  PlainResult plain_;
  Scores scores_;
  Rows q_, k_, v_;
  Rows dout_, dout_rounded_;
  Rows out_;  // of the plain forward formula, in the dtype of out
  Sums values_, by_scores_, by_products_, by_out_;
};

class Jvp {
 public:
  Jvp(const AttentionJvp& args, const Products& products)
      : args_(args),
        forward_(args.forward),
        products_(products),
        plain_(plain_formula(forward_, products)),
        scores_(forward_),
        q_(operands(forward_.q, forward_.q.spec())),
        k_(operands(forward_.k, forward_.k.spec())),
        v_(operands(forward_.v, forward_.v.spec())),
        dq_(operands(args.q_tangent, forward_.q.spec())),
        dk_(operands(args.k_tangent, forward_.k.spec())),
        dv_(operands(args.v_tangent, forward_.v.spec())),
        captured_(scores_.program().zeros()),
        out_(out_spec(forward_)),
        out_by_scores_(out_) {
    for (std::size_t slot = 0; slot < captured_.size(); ++slot) {
      for (const CapturedTensor& given : args.captured_tangents) {
        if (given.name == scores_.program().slots()[slot].name)
          captured_[slot] = elements(given.view);
      }
    }
    result_.lse_tangent.assign(plain_.lse.size(), 0);
    result_.lse_by_scores = result_.lse_tangent;
  }

  PlainJvp run() {
    for (const QueryRow& row : query_rows(forward_)) run_row(row);
    result_.out_tangent = out_.values();
    result_.out_by_scores = out_by_scores_.values();
    result_.largest_score = scores_.largest();
    return std::move(result_);
  }

 private:
  void run_row(const QueryRow& at) {
    const std::vector<Key> keys = scores_(at, q_[at.query], k_);
    const auto lse = static_cast<float>(plain_.lse[at.statistic]);
    std::vector<float> probabilities, moves;
    float lse_tangent = sink_tangent(at, lse);
    float lse_magnitude = std::fabs(lse_tangent);
    std::vector<float> magnitudes;
    for (const Key& key : keys) {
      const RowIndex kv = at.key(key.at.kv_idx);
      const float z = scores_.scale() * (dot(dq_[at.query], k_[kv]) + dot(q_[at.query], dk_[kv]));
      const float magnitude = std::fabs(scores_.scale()) * (absolute_dot(dq_[at.query], k_[kv]) +
                                                            absolute_dot(q_[at.query], dk_[kv]));
      scores_.program()(key.at);
      moves.push_back(static_cast<float>(scores_.program().push_forward(z, captured_)));
      magnitudes.push_back(
          std::fabs(moves.back()) +
          static_cast<float>(std::fabs(scores_.program().push_forward(magnitude, captured_))));
      probabilities.push_back(key_weight(key.score - lse));
      lse_tangent += probabilities.back() * moves.back();
      lse_magnitude += probabilities.back() * magnitudes.back();
    }
    result_.lse_tangent[at.statistic] = lse_tangent;
    result_.lse_by_scores[at.statistic] = lse_magnitude;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const RowIndex kv = at.key(keys[i].at.kv_idx);
      const float weight = keys[i].kept * probabilities[i];
      add(out_[at.query], as_operand(weight * (moves[i] - lse_tangent), products_), v_[kv]);
      add(out_[at.query], as_operand(weight, products_), dv_[kv]);
      add_absolute(out_by_scores_[at.query], weight * (magnitudes[i] + lse_magnitude), v_[kv]);
      add_absolute(out_by_scores_[at.query], weight, dv_[kv]);
    }
  }

  Rows operands(const TensorView& view, const TensorSpec& spec) const {
    return Rows(view, spec).as_operands(products_);
  }

  float sink_tangent(const QueryRow& at, float lse) const {
    if (!forward_.sinks || !args_.sinks_tangent || lse == -kInfinity) return 0;
    const auto of_head = [&](const TensorView& view) {
      return static_cast<float>(element(view, at.at.q_head * view.stride(0)));
    };
    return std::exp(of_head(forward_.sinks) - lse) * of_head(args_.sinks_tangent);
  }

  const AttentionJvp& args_;
  const AttentionForward& forward_;
  const Products products_;
  PlainResult plain_;
  Scores scores_;
  Rows q_, k_, v_, dq_, dk_, dv_;
  SlotValues captured_;
  Rows out_, out_by_scores_;
  PlainJvp result_;
};

}  // namespace

PlainBackward plain_backward(const AttentionBackward& args, const Products& products) {
  return Backward(args, products).run();
}

PlainJvp plain_jvp(const AttentionJvp& args, const Products& products) {
  return Jvp(args, products).run();
}

}  // namespace fovea::reference
