#include "reference/attention_forward.hpp"

#include <limits>

#include "reference/head_rows.hpp"
#include "reference/quantized.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

ForwardResult attention_forward(const AttentionForward& args) {
  if (!args.quant.is_none()) return quantized_forward(args);
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
