#include "cpu/backward/tile_scores.hpp"

#include <cstddef>
#include <cstring>

namespace fovea::cpu {
namespace {

ProgramTile program_tile(const GradientTile& tile, const BackwardCall& call,
                         const BackwardScratch& scratch) {
  const RowRange& rows = tile.panel.rows;
  return {.scores = scratch.scores,
          .num_keys = tile.num_keys(),
          .lanes = static_cast<int>(call.spec.lanes),
          .kv_begin = tile.first_seen(),
          .q_idx = tile.panel.memory->q_idx,
          .q_head = tile.panel.memory->q_head,
          .batch = static_cast<std::int32_t>(rows.sequence.index),
          .kv_head = static_cast<std::int32_t>(rows.kv_head),
          .seqlen_q = static_cast<std::int32_t>(rows.sequence.seqlen_q),
          .seqlen_kv = static_cast<std::int32_t>(rows.sequence.seqlen_kv),
          .scratch = scratch.program};
}

void bind(ProgramTile& program, const Bindings& bindings) {
  program.tensors = bindings.tensors.data();
  program.scalars = bindings.scalars.data();
}

/// Are gradients by the final score wanted first, and multiplied by derivative and scale after?
bool is_chained(const BackwardCall& call) {
  return !call.plan.derivative.empty() || !call.problem.captured.empty();
}

std::size_t num_bytes(const GradientTile& tile, const BackwardCall& call) {
  return static_cast<std::size_t>(tile.num_keys() * call.spec.lanes) * sizeof(float);
}

}  // namespace

void compute_scores(const GradientTile& tile, const KeyTile& keys, const BackwardCall& call,
                    const BackwardScratch& scratch) {
  const GradientPanel& panel = tile.panel;
  const VisiblePart& seen = tile.seen;
  const PanelKernels& kernels = call.kernels;
  NextTile next;
  kernels.scores(panel.memory->queries, keys, seen.range, call.f.head_dim_qk, panel.num_vectors,
                 scratch.scores, next);
  if (call.is_prescaled) kernels.scale(scratch.scores, tile.num_keys(), call.f.softmax_scale);
  if (call.plan.reads_score) std::memcpy(scratch.raw_scores, scratch.scores, num_bytes(tile, call));
  ProgramTile program = program_tile(tile, call, scratch);
  if (!call.plan.score.empty()) {
    bind(program, call.score_bindings);
    kernels.run_score(call.plan.score.tape, program);
  }
  bind(program, call.mask_bindings);
  for (int i = 0; i < seen.num_partial; ++i) {
    const KeyRange part = seen.partial[static_cast<std::size_t>(i)];
    program.scores = scratch.scores + (part.begin - seen.range.begin) * call.spec.lanes;
    program.num_keys = part.count;
    program.kv_begin = tile.kv_begin + part.begin;
    kernels.run_mask(call.plan.mask.tape, program);
  }
}

void compute_dout_products(const GradientTile& tile, const KeyTile& values,
                           const BackwardCall& call, const BackwardScratch& scratch) {
  NextTile next;
  call.kernels.scores(tile.panel.memory->douts, values, tile.seen.range, call.f.head_dim_v,
                      tile.panel.num_vectors, scratch.products, next);
}

SoftmaxGradient softmax_step(const GradientTile& tile, const BackwardCall& call,
                             const BackwardScratch& scratch) {
  const GradientPanel& panel = tile.panel;
  SoftmaxGradient step{.scores = scratch.scores,
                       .products = call.wants_score_gradients ? scratch.products : nullptr,
                       .is_read_between = is_chained(call) || !panel.is_dout_finite,
                       .num_keys = tile.num_keys(),
                       .lanes = call.spec.lanes,
                       .num_vectors = panel.num_vectors,
                       .scale = call.is_prescaled ? 1.0F : call.f.softmax_scale,
                       .factor = is_chained(call) ? 1.0F : call.f.softmax_scale,
                       .origin = panel.memory->origin,
                       .log_sum = panel.memory->log_sum,
                       .delta = panel.memory->delta,
                       .dropout = call.dropout};
  step.dropout.batch = static_cast<std::uint32_t>(panel.rows.sequence.index);
  step.dropout.kv_begin = tile.first_seen();
  step.dropout.q_idx = panel.memory->q_idx;
  step.dropout.q_head = panel.memory->q_head;
  return step;
}

void through_program(const GradientTile& tile, std::int64_t task, CapturedSums& captured,
                     const BackwardCall& call, const BackwardScratch& scratch) {
  if (!is_chained(call)) return;
  const PanelKernels& kernels = call.kernels;
  ProgramTile program = program_tile(tile, call, scratch);
  if (!call.plan.captured.empty()) {
    program.scores = scratch.raw_scores;
    captured.add(task,
                 {.program = program,
                  .gradients = scratch.products,
                  .num_rows = tile.panel.num_rows(),
                  .values = scratch.derivative,
                  .offsets = scratch.offsets},
                 kernels, call.gradient);
  }
  if (call.plan.derivative.empty()) {
    kernels.scale(scratch.products, tile.num_keys(), call.f.softmax_scale);
    return;
  }
  if (call.plan.reads_score)
    std::memcpy(scratch.derivative, scratch.raw_scores, num_bytes(tile, call));
  program.scores = scratch.derivative;
  bind(program, call.derivative_bindings);
  kernels.run_score(call.plan.derivative.tape, program);
  call.gradient.chain(scratch.products, scratch.derivative, tile.num_keys() * call.spec.lanes,
                      call.f.softmax_scale, scratch.products);
}

}  // namespace fovea::cpu
