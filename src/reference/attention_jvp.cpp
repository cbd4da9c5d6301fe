#include "reference/attention_jvp.hpp"

#include "reference/element.hpp"
#include "reference/head_rows.hpp"
#include "reference/query_rows.hpp"
#include "reference/softmax.hpp"

namespace fovea::reference {

namespace {

/// The tangents that are given, by slot of the score program; the others are 0.
SlotValues captured_tangents(const AttentionJvp& args, const Evaluator& score) {
  SlotValues tangents = score.zeros();
  for (std::size_t slot = 0; slot < tangents.size(); ++slot) {
    for (const CapturedTensor& given : args.captured_tangents) {
      if (given.name == score.slots()[slot].name) tangents[slot] = elements(given.view);
    }
  }
  return tangents;
}

}  // namespace

JvpResult attention_jvp(const AttentionJvp& args) {
  const AttentionForward& forward = args.forward;
  const HeadRows q(forward.q);
  const HeadRows k(forward.k);
  const HeadRows v(forward.v);
  const HeadRows dq = rows_or_zeros(args.q_tangent, forward.q);
  const HeadRows dk = rows_or_zeros(args.k_tangent, forward.k);
  const HeadRows dv = rows_or_zeros(args.v_tangent, forward.v);
  JvpResult result{
      .forward = reference::attention_forward(forward), .out_tangent = {}, .lse_tangent = {}};
  result.lse_tangent.assign(num_statistics(forward), 0);
  HeadRows out_tangent = HeadRows::zeros_like(out_spec(forward));

  Softmax softmax(forward);
  Evaluator& score = softmax.score();
  const SlotValues captured = captured_tangents(args, score);
  const std::vector<double> sinks =
      args.sinks_tangent ? elements(args.sinks_tangent) : std::vector<double>(num_heads_q(forward));
  for (const QueryRow& row : query_rows(forward)) {
    const SoftmaxRow p = softmax(row, q[row.query], k);
    std::vector<double> score_tangents;
    double lse_tangent = p.sink_probability * sinks[static_cast<std::size_t>(row.at.q_head)];
    for (const VisibleKey& key : p.keys) {
      const RowIndex at = row.key(key.at.kv_idx);
      const double product = dot(dq[row.query], k[at]) + dot(q[row.query], dk[at]);
      score(key.at);
      score_tangents.push_back(score.push_forward(softmax.scale() * product, captured));
      lse_tangent += key.probability * score_tangents.back();
    }
    result.lse_tangent[row.statistic] = lse_tangent;
    for (std::size_t i = 0; i < p.keys.size(); ++i) {
      const RowIndex at = row.key(p.keys[i].at.kv_idx);
      const double weight = p.keys[i].kept * p.keys[i].probability;
      add(out_tangent[row.query], weight * (score_tangents[i] - lse_tangent), v[at]);
      add(out_tangent[row.query], weight, dv[at]);
    }
  }
  result.out_tangent = out_tangent.values();
  return result;
}

}  // namespace fovea::reference
