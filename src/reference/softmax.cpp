#include "reference/softmax.hpp"

#include <algorithm>
#include <cmath>

#include "core/philox.hpp"
#include "problem/forward.hpp"
#include "reference/element.hpp"

namespace fovea::reference {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Softmax::Softmax(const AttentionForward& args)
    : score_(args.score),
      mask_(args.mask),
      scale_(args.softmax_scale
                 ? *args.softmax_scale
                 : 1 / std::sqrt(static_cast<double>(args.q.size(args.q.rank() - 1)))),
      sinks_(args.sinks),
      dropout_(dropout_of(args)),
      dropout_places_(dropout_places_of(args)) {}

SoftmaxRow Softmax::operator()(const QueryRow& row, std::span<const double> q, const HeadRows& k) {
  return (*this)(row, [&](std::int64_t kv_idx) { return dot(q, k[row.key(kv_idx)]); });
}

SoftmaxRow Softmax::operator()(const QueryRow& row, const Product& product) {
  SoftmaxRow result;
  find_visible(row, product, result);
  normalise(sinks_ ? element(sinks_, row.at.q_head * sinks_.stride(0)) : -kInfinity, result);
  drop(result);
  return result;
}

/// What the mask hides is not even multiplied, and a score below the range of f32 is -inf. A NaN in sight wins over
/// every number as row_max.
void Softmax::find_visible(const QueryRow& row, const Product& product, SoftmaxRow& result) {
  Position at = row.at;
  for (at.kv_idx = 0; at.kv_idx < at.seqlen_kv; ++at.kv_idx) {
    at.score = 0;
    if (mask_(at) == 0) continue;
    at.score = scale_ * product(at.kv_idx);
    const double score = score_(at);
    if (static_cast<float>(score) == -kInfinity) continue;
    result.keys.push_back({.at = at, .score = score});
    if (score > result.row_max || std::isnan(score)) result.row_max = score;
  }
}

/// probability = exp(score) / (exp(sink) + Σ exp(score)), with the largest exponent taken out. A
/// row with neither key nor sink keeps lse -inf. A sink of +inf takes all the weight; NaN wins over every number.
void Softmax::normalise(double sink, SoftmaxRow& result) const {
  double largest = std::isnan(sink) ? sink : std::max(result.row_max, sink);
  if (std::isnan(result.row_max)) largest = result.row_max;
  if (largest == -kInfinity) return;
  result.sink_probability = sink == largest ? 1 : std::exp(sink - largest);
  double sum = result.sink_probability;
  for (VisibleKey& key : result.keys) {
    key.probability = std::exp(key.score - largest);
    sum += key.probability;
  }
  for (VisibleKey& key : result.keys) key.probability /= sum;
  result.sink_probability /= sum;
  result.lse = largest + std::log(sum);
}

/// After the softmax, so lse does not know of it.
void Softmax::drop(SoftmaxRow& result) const {
  if (dropout_.p == 0) return;
  const philox::Key key = philox::dropout_key(dropout_.seed, dropout_.offset);
  const std::uint64_t threshold = philox::drop_threshold(dropout_.p);
  for (VisibleKey& each : result.keys) {
    const Position& at = each.at;
    const bool keeps = philox::random_word(key, dropout_places_, at.batch, at.q_head, at.q_idx,
                                           at.kv_idx) >= threshold;
    each.kept = keeps ? 1 / (1 - static_cast<double>(dropout_.p)) : 0;
  }
}

}  // namespace fovea::reference
