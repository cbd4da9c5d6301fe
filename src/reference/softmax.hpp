// One row of probabilities: what forward, backward and forward mode have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "fovea/attention.hpp"

#include "core/philox.hpp"
#include "reference/evaluate.hpp"
#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"

namespace fovea::reference {

struct VisibleKey {
  Position at;             // of query and key; at.score is scale · q · k, what the program sees
  double score = 0;        // what the program made of it
  double probability = 0;  // exp(score - lse)
  double kept = 1;         // by dropout: 0, or 1 / (1 - p). The key's weight is kept · probability
};

/// Hidden keys (masked, or of score -inf) are not in the list, so nothing of theirs can matter.
struct SoftmaxRow {
  std::vector<VisibleKey> keys;
  double row_max = -std::numeric_limits<double>::infinity();
  double lse = -std::numeric_limits<double>::infinity();
  double sink_probability = 0;
};

/// Reads score, mask, softmax_scale, sinks, dropout and the head dim of q.
class Softmax {
 public:
  explicit Softmax(const AttentionForward& args);

  /// The row of query q. `row` says where it stands, and its keys in k.
  SoftmaxRow operator()(const QueryRow& row, std::span<const double> q, const HeadRows& k);
  /// The same of other products: product(kv_idx) in place of q · k.
  using Product = std::function<double(std::int64_t)>;
  SoftmaxRow operator()(const QueryRow& row, const Product& product);

  double scale() const { return scale_; }
  Evaluator& score() { return score_; }

 private:
  void find_visible(const QueryRow& row, const Product& product, SoftmaxRow& result);
  void normalise(double sink, SoftmaxRow& result) const;
  void drop(SoftmaxRow& result) const;

  Evaluator score_, mask_;
  double scale_;
  TensorView sinks_;
  Dropout dropout_;
  philox::Places dropout_places_;
};

}  // namespace fovea::reference
