#include "cpu/forward/score_programs.hpp"

namespace fovea::cpu {

void apply_programs(const TileStep& step, const ForwardCall& call, const ForwardScratch& scratch) {
  const RowPanel& panel = *step.panel;
  const Sequence& s = panel.rows.sequence;
  const VisiblePart& seen = step.seen;
  const PanelKernels& kernels = call.kernels;
  const std::int64_t num_keys = seen.range.count;
  const bool has_next = (step.tile + 2) * call.spec.tile_kv <= s.seqlen_kv;
  if (call.is_prescaled && call.plan.score.empty()) {
    kernels.scale(step.scores, num_keys, call.problem.softmax_scale);
  }
  ProgramTile program{.scores = step.scores,
                      .num_keys = num_keys,
                      .lanes = static_cast<int>(call.spec.lanes),
                      .kv_begin = step.tile * call.spec.tile_kv + seen.range.begin,
                      .q_idx = panel.q_idx,
                      .q_head = panel.q_head,
                      .batch = static_cast<std::int32_t>(s.index),
                      .kv_head = static_cast<std::int32_t>(panel.rows.kv_head),
                      .seqlen_q = static_cast<std::int32_t>(s.seqlen_q),
                      .seqlen_kv = static_cast<std::int32_t>(s.seqlen_kv),
                      .scratch = scratch.program,
                      .keys_ahead = has_next ? call.spec.tile_kv : 0,
                      .factor = call.problem.softmax_scale};
  if (!call.plan.score.empty()) {
    program.tensors = call.score_bindings.tensors.data();
    program.scalars = call.score_bindings.scalars.data();
    kernels.run_score(call.plan.score.tape, program);
  }
  program.tensors = call.mask_bindings.tensors.data();
  program.scalars = call.mask_bindings.scalars.data();
  for (int i = 0; i < seen.num_partial; ++i) {
    const KeyRange part = seen.partial[static_cast<std::size_t>(i)];
    program.scores = step.scores + (part.begin - seen.range.begin) * call.spec.lanes;
    program.num_keys = part.count;
    program.kv_begin = step.tile * call.spec.tile_kv + part.begin;
    if (panel.seen.begin != nullptr) {
      kernels.hide(program.scores, part.count, program.kv_begin, panel.seen);
    } else {
      kernels.run_mask(call.plan.mask.tape, program);
    }
  }
}

PanelDropout dropout_of(const TileStep& step, const ForwardCall& call) {
  PanelDropout dropout = call.dropout;
  dropout.batch = static_cast<std::uint32_t>(step.panel->rows.sequence.index);
  dropout.kv_begin = step.tile * call.spec.tile_kv + step.seen.range.begin;
  dropout.q_idx = step.panel->q_idx;
  dropout.q_head = step.panel->q_head;
  return dropout;
}

}  // namespace fovea::cpu
