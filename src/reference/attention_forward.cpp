#include "reference/attention_forward.hpp"

#include <cmath>
#include <limits>
#include <span>

#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

namespace {

/// out += weight · value. A value that is not finite reaches every row that sees it, whatever it weighs: a weight may be 0 by rounding
/// or by dropout.
void add_value(std::span<double> out, double weight, std::span<const double> value) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] += weight == 0 && !std::isfinite(value[i]) ? value[i] : weight * value[i];
}

}  // namespace

ForwardResult attention_forward(const AttentionForward& args) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const HeadRows q(args.q);
  const HeadRows k(args.k);
  const HeadRows v(args.v);
  HeadRows out = HeadRows::zeros_like(out_spec(args));
  ForwardResult result;
  result.lse.assign(num_statistics(args), -kInfinity);
  result.row_max = result.lse;
  Softmax softmax(args);
  for (const QueryRow& row : query_rows(args)) {
    const SoftmaxRow p = softmax(row, q[row.query], k);
    result.lse[row.statistic] = p.lse;
    result.row_max[row.statistic] = p.row_max;
    for (const VisibleKey& key : p.keys) {
      add_value(out[row.query], key.kept * key.probability, v[row.key(key.at.kv_idx)]);
    }
  }
  result.out = out.values();
  return result;
}

}  // namespace fovea::reference
