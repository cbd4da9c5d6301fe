// Calls on what a rank has: attention_forward and attention_backward of some rows, keys and heads, whose programs speak
// of the whole.
#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "parallel/engine/engine.hpp"

namespace fovea::parallel {
namespace {

/// [num_heads_q]: those of the part.
TensorView of_heads(const TensorView& per_head, const HeadRange& heads) {
  return per_head ? part_of(per_head, 0, heads.begin, heads.end) : per_head;
}

/// [batch, num_heads_kv]: those of the part.
TensorView of_kv_heads(const TensorView& scales, const HeadRange& heads) {
  return scales ? part_of(scales, 1, heads.begin, heads.end) : scales;
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
  if (rows.row_max) local.row_max = lse_of_call(rows.row_max);
  local.score = placed(call.args.score, place);
  local.mask = placed(call.args.mask, place);
  local.softmax_scale = call.args.softmax_scale;
  if (part.has_sinks) local.sinks = of_heads(call.args.sinks, part.heads.q);
  local.quant = call.args.quant;
  local.q_scale = of_kv_heads(call.args.q_scale, part.heads.kv);
  local.k_scale = of_kv_heads(call.args.k_scale, part.heads.kv);
  local.v_scale = of_kv_heads(call.args.v_scale, part.heads.kv);
  local.dropout = call.args.dropout;
  local.dropout_seed = call.args.dropout_seed;
  local.dropout_offset = call.args.dropout_offset;
  if (local.dropout.p > 0)
    local.dropout_places = call.dropout_tables.of(part, rows, keys, call.memory);
  local.compute_dtype = call.args.compute_dtype;
  local.cpu_target = call.args.cpu_target;
  local.is_deterministic = call.args.is_deterministic;
  local.sm_margin = call.args.sm_margin;
  local.executor = call.args.executor;
  local.stream = call.args.stream;
  return local;
}

void append_range(std::vector<std::int32_t>& values, std::int64_t begin, std::int64_t end) {
  append_tokens(values, std::array{TokenRange{begin, end}});
}

void append(std::vector<std::int32_t>& values, const Places& places, std::int64_t num_tokens) {
  if (places.ranges.empty()) append_range(values, 0, num_tokens);
  append_tokens(values, places.ranges);
}

}  // namespace

TensorView DropoutTables::of(const LocalPart& part, const Rows& rows, const Keys& keys,
                             const Memory& memory) {
  const Key key{.batch = rows.q.size(1),
                .num_queries = rows.q.size(0),
                .num_keys = keys.k.size(0),
                .first_head = part.heads.q.begin,
                .num_heads = rows.q.size(2),
                .q = part.q.ranges.data(),
                .kv = part.kv.ranges.data()};
  const auto found = std::ranges::find(made_, key, &Made::key);
  if (found != made_.end()) return found->table.view;
  std::vector<std::int32_t> values;
  append_range(values, 0, key.batch);
  append_range(values, key.first_head, key.first_head + key.num_heads);
  append(values, part.q, key.num_queries);
  append(values, part.kv, key.num_keys);
  return made_.emplace_back(key, memory.of_values(values)).table.view;
}

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
