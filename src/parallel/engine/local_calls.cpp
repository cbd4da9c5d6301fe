// Calls on what a rank has: attention_forward and attention_backward of some rows, keys and heads, whose programs speak
// of the whole.
#include <cstddef>

#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

/// [num_heads_q]: those of the part.
TensorView of_heads(const TensorView& per_head, const HeadRange& heads) {
  return per_head ? part_of(per_head, 0, heads.begin, heads.end) : per_head;
}

AttentionForward local_forward(const EngineCall& call, const Rows& rows, const Keys& keys,
                               const LocalPart& part) {
  const Part place{.q = part.q,
                   .kv = part.kv,
                   .seqlen = call.plan.shape.seqlen,
                   .first_q_head = part.heads.q.begin,
                   .first_kv_head = part.heads.kv.begin};
  AttentionForward local{
      .q = turned(rows.q), .k = turned(keys.k), .v = turned(keys.v), .out = turned(rows.out)};
  local.lse = lse_of_call(rows.lse);
  local.score = placed(call.args.score, place);
  local.mask = placed(call.args.mask, place);
  local.softmax_scale = call.args.softmax_scale;
  if (part.has_sinks) local.sinks = of_heads(call.args.sinks, part.heads.q);
  local.compute_dtype = call.args.compute_dtype;
  local.cpu_target = call.args.cpu_target;
  local.is_deterministic = call.args.is_deterministic;
  local.sm_margin = call.args.sm_margin;
  local.executor = call.args.executor;
  local.stream = call.args.stream;
  return local;
}

}  // namespace

TensorView turned(const TensorView& tensor) { return tensor.permuted({1, 0, 2, 3}); }
TensorView turned_lse(const TensorView& lse) { return lse.permuted({2, 0, 1}); }
TensorView lse_of_call(const TensorView& tokens_first) { return tokens_first.permuted({1, 2, 0}); }

void attend(const EngineCall& call, const Rows& rows, const Keys& keys, const LocalPart& part) {
  attention_forward(local_forward(call, rows, keys, part));
}

void differentiate(const EngineCall& call, const Rows& rows, const Keys& keys,
                   const LocalPart& part, const EngineGradients& made) {
  AttentionBackward local{.dout = turned(rows.dout),
                          .forward = local_forward(call, rows, keys, part)};
  if (rows.dlse) local.dlse = lse_of_call(rows.dlse);
  if (made.dq) local.dq = turned(made.dq);
  if (made.dk) local.dk = turned(made.dk);
  if (made.dv) local.dv = turned(made.dv);
  if (part.has_sinks) local.dsinks = of_heads(made.dsinks, part.heads.q);
  local.dcaptured = made.dcaptured;
  local.executor = call.args.executor;
  local.stream = call.args.stream;
  attention_backward(local);
}

std::vector<CapturedTensor> CapturedSums::next() {
  std::vector<CapturedTensor> result;
  for (std::size_t i = 0; i < written_.size(); ++i) {
    parts_[i].push_back(memory_.make_like(written_[i].view, Dtype::f32));
    result.push_back({written_[i].name, parts_[i].back().view});
  }
  return result;
}

void CapturedSums::write() const {
  for (std::size_t i = 0; i < written_.size(); ++i) {
    std::vector<TensorView> parts;
    for (const OwnedTensor& part : parts_[i]) parts.push_back(part.view);
    memory_.sum(written_[i].view, parts);
  }
}

}  // namespace fovea::parallel
