#include "reference/attention_backward.hpp"

#include <cmath>

#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/quantized.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

namespace {

/// lse of a row that sees neither key nor sink: a constant.
bool is_empty(const SoftmaxRow& row) { return row.keys.empty() && row.sink_probability == 0; }

std::vector<double> values_or_zeros(const TensorView& view, std::size_t count) {
  return view ? elements(view) : std::vector<double>(count);
}

/// A recipe's rounding is passed straight through: gradients are those of attention at the rounded operands.
RoundedOperands operands_of(const AttentionForward& forward) {
  if (!forward.quant.is_none()) return rounded_operands(forward);
  return {HeadRows(forward.q), HeadRows(forward.k), HeadRows(forward.v)};
}

}  // namespace

BackwardResult attention_backward(const AttentionBackward& args) {
  const AttentionForward& forward = args.forward;
  const auto [q, k, v] = operands_of(forward);
  const HeadRows dout(args.dout);
  const std::vector<double> dlse = values_or_zeros(args.dlse, num_statistics(forward));
  HeadRows dq = HeadRows::zeros_like(forward.q.spec());
  HeadRows dk = HeadRows::zeros_like(forward.k.spec());
  HeadRows dv = HeadRows::zeros_like(forward.v.spec());
  BackwardResult result;
  if (forward.sinks) result.dsinks.assign(static_cast<std::size_t>(forward.sinks.size(0)), 0);

  Softmax softmax(forward);
  Evaluator& score = softmax.score();
  SlotValues dcaptured = score.zeros();
  for (const QueryRow& row : query_rows(forward)) {
    const SoftmaxRow p = softmax(row, q[row.query], k);
    if (is_empty(p)) continue;
    const auto dp = [&](const VisibleKey& key) {
      return key.kept * dot(dout[row.query], v[row.key(key.at.kv_idx)]);
    };
    double delta = -dlse[row.statistic];
    for (const VisibleKey& key : p.keys) delta += key.probability * dp(key);
    for (const VisibleKey& key : p.keys) {
      const RowIndex at = row.key(key.at.kv_idx);
      const double ds = key.probability * (dp(key) - delta);
      score(key.at);
      const double dproduct = softmax.scale() * score.pull_back(ds, dcaptured);
      add(dq[row.query], dproduct, k[at]);
      add(dk[at], dproduct, q[row.query]);
      add(dv[at], key.kept * key.probability, dout[row.query]);
    }
    if (forward.sinks)
      result.dsinks[static_cast<std::size_t>(row.at.q_head)] -= p.sink_probability * delta;
  }

  result.dq = dq.values();
  result.dk = dk.values();
  result.dv = dv.values();
  for (std::size_t slot = 0; slot < dcaptured.size(); ++slot) {
    result.dcaptured[score.slots()[slot].name] = dcaptured[slot];
  }
  return result;
}

namespace {

/// Tangents of captured floats, by slot; 0 where none is given.
SlotValues captured_directions(const Evaluator& score, const std::vector<CapturedTensor>& given) {
  SlotValues directions = score.zeros();
  for (std::size_t slot = 0; slot < directions.size(); ++slot) {
    for (const CapturedTensor& each : given) {
      if (each.name == score.slots()[slot].name) directions[slot] = elements(each.view);
    }
  }
  return directions;
}

}  // namespace

// With T = Σ p s' = lse' and D = Σ p dp, sums over keys and the sink, whose dp is 0, a row has
//   L = Σ p s' (dp + dlse) - T D + Σ p e,   e = kept · dout · ddv.
// s' is how the score program moves with z' = scale (ddq · k + q · ddk) and what it captures; the sink's s' is ddsinks.
DoubleBackwardResult attention_double_backward(const AttentionDoubleBackward& args) {
  const AttentionForward& forward = args.backward.forward;
  const HeadRows q(forward.q);
  const HeadRows k(forward.k);
  const HeadRows v(forward.v);
  const HeadRows dout(args.backward.dout);
  const std::vector<double> dlse = values_or_zeros(args.backward.dlse, num_statistics(forward));
  const HeadRows ddq = rows_or_zeros(args.ddq, forward.q);
  const HeadRows ddk = rows_or_zeros(args.ddk, forward.k);
  const HeadRows ddv = rows_or_zeros(args.ddv, forward.v);
  const std::size_t num_sinks =
      forward.sinks ? static_cast<std::size_t>(forward.sinks.size(0)) : std::size_t{0};
  const std::vector<double> ddsinks = values_or_zeros(args.ddsinks, num_sinks);
  HeadRows grad_dout = HeadRows::zeros_like(args.backward.dout.spec());
  HeadRows grad_q = HeadRows::zeros_like(forward.q.spec());
  HeadRows grad_k = HeadRows::zeros_like(forward.k.spec());
  HeadRows grad_v = HeadRows::zeros_like(forward.v.spec());
  DoubleBackwardResult result;
  result.grad_dlse.assign(num_statistics(forward), 0);
  result.grad_sinks.assign(num_sinks, 0);

  struct Key {
    VisibleKey of_row;
    RowIndex at;
    double dz = 0, ds = 0;  // z' and s'
    double dp = 0, e = 0;
    double by_p = 0;  // dL/dp
  };
  Softmax softmax(forward);
  Evaluator& score = softmax.score();
  const double scale = softmax.scale();
  const SlotValues directions = captured_directions(score, args.ddcaptured);
  SlotValues grad_captured = score.zeros();
  for (const QueryRow& row : query_rows(forward)) {
    const SoftmaxRow p = softmax(row, q[row.query], k);
    if (is_empty(p)) continue;
    const auto head = static_cast<std::size_t>(row.at.q_head);
    const double dsink = num_sinks > 0 ? ddsinks[head] : 0;
    std::vector<Key> keys;
    double t = p.sink_probability * dsink;
    double d = 0;
    for (const VisibleKey& each : p.keys) {
      Key key{.of_row = each, .at = row.key(each.at.kv_idx)};
      score(each.at);
      key.dz = scale * (dot(ddq[row.query], k[key.at]) + dot(q[row.query], ddk[key.at]));
      key.ds = score.push_forward(key.dz, directions);
      key.dp = each.kept * dot(dout[row.query], v[key.at]);
      key.e = each.kept * dot(dout[row.query], ddv[key.at]);
      t += each.probability * key.ds;
      d += each.probability * key.dp;
      keys.push_back(key);
    }
    const double lse_gradient = dlse[row.statistic];
    const double sink_by_p = dsink * (lse_gradient - d);
    double mean_by_p = p.sink_probability * sink_by_p;
    for (Key& key : keys) {
      key.by_p = key.ds * (key.dp + lse_gradient) - key.ds * d - t * key.dp + key.e;
      mean_by_p += key.of_row.probability * key.by_p;
    }
    result.grad_dlse[row.statistic] = t;
    if (num_sinks > 0) result.grad_sinks[head] += p.sink_probability * (sink_by_p - mean_by_p);
    for (const Key& key : keys) {
      const double probability = key.of_row.probability;
      const double by_dp = probability * (key.ds - t);                 // dL/d dp
      const double by_ds = probability * (key.dp + lse_gradient - d);  // dL/d s'
      const double by_s = probability * (key.by_p - mean_by_p);        // dL/ds
      score(key.of_row.at);
      // By z and by z'.
      const TangentSeeds by = score.pull_back_tangent({.value = by_s, .tangent = by_ds}, key.dz,
                                                      directions, grad_captured);
      add(grad_dout[row.query], key.of_row.kept * by_dp, v[key.at]);
      add(grad_dout[row.query], key.of_row.kept * probability, ddv[key.at]);
      add(grad_v[key.at], key.of_row.kept * by_dp, dout[row.query]);
      add(grad_q[row.query], scale * by.value, k[key.at]);
      add(grad_q[row.query], scale * by.tangent, ddk[key.at]);
      add(grad_k[key.at], scale * by.value, q[row.query]);
      add(grad_k[key.at], scale * by.tangent, ddq[row.query]);
    }
  }

  result.grad_dout = grad_dout.values();
  result.grad_q = grad_q.values();
  result.grad_k = grad_k.values();
  result.grad_v = grad_v.values();
  for (std::size_t slot = 0; slot < grad_captured.size(); ++slot)
    result.grad_captured[score.slots()[slot].name] = grad_captured[slot];
  return result;
}

}  // namespace fovea::reference
