// --check of gradients: beside the oracle stands the plain formula in the kernels' dtypes, whose error is the yardstick.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "check.hpp"
#include "core/philox.hpp"
#include "reference/attention_backward.hpp"
#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"

namespace fovea::tools {
namespace {

using reference::HeadRows;
using reference::QueryRow;
using reference::RowIndex;
using Row = std::span<const double>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// A gradient of the plain formula, and what its rounding errors are relative to.
struct Sum {
  explicit Sum(const TensorView& like)
      : values(HeadRows::zeros_like(like.spec())), magnitudes(values) {}

  /// fp32 sums of factor · row, where the factor has about the error of `magnitude`.
  void add(const RowIndex& at, float factor, float magnitude, Row row) {
    const std::span<double> sum = values[at];
    const std::span<double> largest = magnitudes[at];
    for (std::size_t i = 0; i < row.size(); ++i) {
      sum[i] = static_cast<float>(sum[i]) + factor * static_cast<float>(row[i]);
      largest[i] += static_cast<double>(magnitude) * std::fabs(row[i]);
    }
  }

  HeadRows values, magnitudes;
};

double largest_of(const std::vector<double>& magnitudes) {
  double largest = 0;
  for (const double magnitude : magnitudes) {
    if (std::isfinite(magnitude)) largest = std::max(largest, std::fabs(magnitude));
  }
  return largest;
}

/// Attention's gradients as a person would code them: probabilities from lse, fp32 sums in plain order, inputs of the products
/// rounded to their dtype.
class PlainBackward {
 public:
  struct Result {
    Sum dq, dk, dv;
    std::vector<double> dsinks, sink_magnitudes;
    reference::SlotValues captured, captured_magnitudes;
    double largest_score = 0;
  };

  PlainBackward(const AttentionBackward& args, ComputeDtype dtype)
      : forward_(args.forward),
        dtype_(dtype),
        q_(forward_.q),
        k_(forward_.k),
        v_(forward_.v),
        out_(forward_.out),
        dout_(args.dout),
        lse_(reference::elements(forward_.lse)),
        dlse_(args.dlse ? reference::elements(args.dlse) : std::vector<double>(lse_.size())),
        score_(forward_.score, reference::Precision::f32),
        mask_(forward_.mask, reference::Precision::f32),
        softmax_scale_(forward_.softmax_scale.value_or(
            1 / std::sqrt(static_cast<float>(forward_.q.size(forward_.q.rank() - 1))))),
        result_{.dq = Sum(forward_.q),
                .dk = Sum(forward_.k),
                .dv = Sum(forward_.v),
                .dsinks = std::vector<double>(reference::num_heads_q(forward_)),
                .sink_magnitudes = std::vector<double>(reference::num_heads_q(forward_)),
                .captured = score_.zeros(),
                .captured_magnitudes = score_.zeros()} {}

  const Result& run() {
    for (const QueryRow& row : reference::query_rows(forward_)) run_row(row);
    return result_;
  }

  const std::vector<reference::Slot>& slots() const { return score_.slots(); }

 private:
  struct Product {
    float value = 0, magnitude = 0;
  };
  Product product(Row a, Row b) const {
    Product sum;
    for (std::size_t i = 0; i < a.size(); ++i) {
      const float term = as_input(a[i]) * as_input(b[i]);
      sum.value += term;
      sum.magnitude += std::fabs(term);
    }
    return sum;
  }

  float as_input(double value) const { return rounded(static_cast<float>(value), dtype_); }

  void run_row(const QueryRow& row) {
    const auto lse = static_cast<float>(lse_[row.statistic]);
    if (lse == -kInfinity) return;
    const auto dlse = static_cast<float>(dlse_[row.statistic]);
    Product delta{-dlse, std::fabs(dlse)};
    bool sees_keys = false;
    reference::Position at = row.at;
    for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
      at.score = 0;
      if (mask_(at) == 0) continue;
      at.score = softmax_scale_ * product(q_[row.query], k_[row.key(at.kv_idx)]).value;
      const auto score = static_cast<float>(score_(at));
      if (score == -kInfinity) continue;
      if (!sees_keys) add_delta(row, delta);
      sees_keys = true;
      if (std::isfinite(score))
        result_.largest_score = std::max<double>(result_.largest_score, std::fabs(score));
      add_key(row, at, std::exp(score - lse), delta);
    }
    if (forward_.sinks) add_sink(row, lse, delta);
  }

  void add_delta(const QueryRow& row, Product& delta) const {
    const std::span<const double> out = out_[row.query], dout = dout_[row.query];
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float term = static_cast<float>(dout[i]) * static_cast<float>(out[i]);
      delta.value += term;
      delta.magnitude += std::fabs(term);
    }
  }

  /// The program was evaluated at `at` just now.
  void add_key(const QueryRow& row, const reference::Position& at, float probability,
               const Product& delta) {
    const RowIndex key = row.key(at.kv_idx);
    const float kept = kept_of(at);
    const Product dp = product(dout_[row.query], v_[key]);
    const float ds = probability * (kept * dp.value - delta.value);
    const float magnitude = probability * (kept * dp.magnitude + delta.magnitude);
    const auto dz = softmax_scale_ * static_cast<float>(score_.pull_back(ds, result_.captured));
    const auto dz_magnitude =
        softmax_scale_ *
        std::fabs(static_cast<float>(score_.pull_back(magnitude, result_.captured_magnitudes)));
    result_.dq.add(row.query, as_input(dz), dz_magnitude, k_[key]);
    result_.dk.add(key, as_input(dz), dz_magnitude, q_[row.query]);
    result_.dv.add(key, as_input(kept * probability), kept * probability, dout_[row.query]);
  }

  void add_sink(const QueryRow& row, float lse, const Product& delta) {
    const auto head = static_cast<std::size_t>(row.at.q_head);
    const auto sink = static_cast<float>(
        reference::element(forward_.sinks, row.at.q_head * forward_.sinks.stride(0)));
    const float probability = std::exp(sink - lse);
    result_.dsinks[head] -= probability * delta.value;
    result_.sink_magnitudes[head] += probability * delta.magnitude;
  }

  float kept_of(const reference::Position& at) const {
    const Dropout& dropout = forward_.dropout;
    if (dropout.p == 0) return 1;
    const philox::Key key = philox::dropout_key(dropout.seed, dropout.offset);
    const bool keeps = philox::random_word(key, at.batch, at.q_head, at.q_idx, at.kv_idx) >=
                       philox::drop_threshold(dropout.p);
    return keeps ? 1 / (1 - dropout.p) : 0;
  }

  const AttentionForward& forward_;
  ComputeDtype dtype_;
  const HeadRows q_, k_, v_, out_, dout_;
  const std::vector<double> lse_, dlse_;
  reference::Evaluator score_, mask_;
  float softmax_scale_;
  Result result_;
};

}  // namespace

std::vector<std::pair<std::string, Difference>> check_backward(const AttentionBackward& args,
                                                               ComputeDtype compute_dtype) {
  const reference::BackwardResult expected = reference::attention_backward(args);
  PlainBackward formula(args, compute_dtype);
  const PlainBackward::Result& plain = formula.run();
  const double relative_floor =
      rounding(dtype_of_products(compute_dtype), 1) + floor_of_scores(plain.largest_score);
  std::vector<std::pair<std::string, Difference>> differences;
  const auto check = [&](const std::string& name, const TensorView& got,
                         const std::vector<double>& oracle, const std::vector<double>& of_plain,
                         const std::vector<double>& magnitudes) {
    if (!got) return;
    const std::vector<double> values = reference::elements(got);
    differences.emplace_back(name, compare({values, oracle, of_plain}, got.dtype(),
                                           relative_floor * largest_of(magnitudes)));
  };
  check("dq", args.dq, expected.dq, plain.dq.values.values(), plain.dq.magnitudes.values());
  check("dk", args.dk, expected.dk, plain.dk.values.values(), plain.dk.magnitudes.values());
  check("dv", args.dv, expected.dv, plain.dv.values.values(), plain.dv.magnitudes.values());
  check("sinks", args.dsinks, expected.dsinks, plain.dsinks, plain.sink_magnitudes);
  for (const CapturedTensor& wanted : args.dcaptured) {
    for (std::size_t i = 0; i < formula.slots().size(); ++i) {
      if (formula.slots()[i].name != wanted.name) continue;
      check(wanted.name, wanted.view, expected.dcaptured.at(wanted.name), plain.captured[i],
            plain.captured_magnitudes[i]);
    }
  }
  return differences;
}

}  // namespace fovea::tools
