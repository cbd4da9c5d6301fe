#include "cpu/forward/workspace.hpp"

#include <algorithm>

#include "quant/row_codes.hpp"

namespace fovea::cpu {

WorkerScratch WorkerScratch::carve(Carver& carver, const ForwardSpec& spec,
                                   const PanelKernels& kernels, std::int64_t head_dim_qk,
                                   std::int64_t head_dim_v, std::size_t program_bytes) {
  const auto panels = static_cast<std::size_t>(spec.panels);
  const auto lanes = static_cast<std::size_t>(spec.lanes);
  WorkerScratch s;
  s.queries = carver.take<std::byte>(panels * kernels.query_bytes(head_dim_qk));
  s.out = carver.take<std::byte>(panels * kernels.output_bytes(head_dim_v));
  s.row_max = carver.take<float>(panels * lanes);
  s.origin = carver.take<float>(panels * lanes);
  s.row_sum = carver.take<float>(panels * lanes);
  s.rescale = carver.take<float>(lanes);
  s.q_idx = carver.take<std::int32_t>(panels * lanes);
  s.q_head = carver.take<std::int32_t>(panels * lanes);
  s.seen_begin = carver.take<std::int32_t>(panels * lanes);
  s.seen_end = carver.take<std::int32_t>(panels * lanes);
  s.rows = carver.take<const std::byte*>(lanes);
  s.keys = carver.take<std::byte>(kernels.key_bytes(spec.tile_kv, head_dim_qk));
  s.values = carver.take<std::byte>(kernels.value_bytes(spec.tile_kv, head_dim_v));
  s.scores = carver.take<float>(kernels.score_bytes(spec.tile_kv) / sizeof(float));
  if (kernels.pipeline_bytes != nullptr)
    s.pipeline = carver.take<std::byte>(kernels.pipeline_bytes(spec.tile_kv));
  s.extra = carver.take<float>(kernels.output_bytes(head_dim_v) / sizeof(float));
  s.states = carver.take<float>(static_cast<std::size_t>(kRowsAtOnce * state_pitch(head_dim_v)));
  s.merged = carver.take<float>(lanes * static_cast<std::size_t>(state_floats(head_dim_v)));
  s.program = carver.take<std::byte>(program_bytes);
  return s;
}

FewRowsScratch FewRowsScratch::carve(Carver& carver, const ForwardSpec& spec,
                                     const ForwardProblem& problem) {
  const std::int64_t num_heads = std::min(kMaxHeadsAtOnce, problem.num_heads_kv);
  const auto rows = [&](std::int64_t pitch) {
    return static_cast<std::size_t>(num_heads * kFewRows * pitch);
  };
  const auto lanes = static_cast<std::size_t>(num_heads * spec.lanes);
  const auto extra = static_cast<std::size_t>(kFewRows * padded(problem.head_dim_v));
  FewRowsScratch s;
  s.queries = carver.take<float>(rows(padded(problem.head_dim_qk)));
  s.scores = carver.take<float>(rows(spec.tile_kv));
  s.sums = carver.take<float>(rows(padded(problem.head_dim_v)));
  s.extra = carver.take<float>(extra);
  for (float** state : {&s.row_max, &s.origin, &s.row_sum, &s.rescale})
    *state = carver.take<float>(lanes);
  s.q_idx = carver.take<std::int32_t>(lanes);
  s.q_head = carver.take<std::int32_t>(lanes);
  s.merged = carver.take<float>(rows(state_floats(problem.head_dim_v)));
  return s;
}

CacheScratch CacheScratch::carve(Carver& carver, const ForwardSpec& spec,
                                 const ForwardProblem& problem) {
  CacheScratch s;
  const Dtype k = problem.problem.k.dtype;
  const Dtype v = problem.problem.v.dtype;
  if (!problem.is_paged && !quant::is_code(k) && !quant::is_code(v)) return s;
  const auto keys = static_cast<std::size_t>(spec.tile_kv);
  for (RowList* list : {&s.key_rows, &s.value_rows, &s.next_key_rows, &s.next_value_rows})
    list->rows = carver.take<const std::byte*>(keys);
  if (quant::is_code(k)) s.key_rows.scales = carver.take<float>(keys);
  if (quant::is_code(v)) s.value_rows.scales = carver.take<float>(keys);
  const auto tile_bytes = [&](Dtype dtype, std::int64_t head_dim) {
    const Dtype held = quant::is_code(dtype) ? Dtype::f32 : dtype;
    return keys * static_cast<std::size_t>(head_dim) * size_bytes(held);
  };
  s.keys = carver.take<std::byte>(tile_bytes(k, problem.head_dim_qk));
  s.values = carver.take<std::byte>(tile_bytes(v, problem.head_dim_v));
  return s;
}

ForwardMemory ForwardMemory::carve(Carver& carver, const ForwardSpec& spec,
                                   const ForwardProblem& problem, std::size_t program_bytes,
                                   int num_threads) {
  ForwardMemory m;
  m.first_item = carver.take<std::int64_t>(static_cast<std::size_t>(problem.num_sequences) + 1);
  for (int worker = 0; worker < num_threads; ++worker) {
    m.workers.push_back(
        {WorkerScratch::carve(carver, spec, forward_kernels(spec), problem.head_dim_qk,
                              problem.head_dim_v, program_bytes),
         FewRowsScratch::carve(carver, spec, problem), CacheScratch::carve(carver, spec, problem)});
  }
  const std::size_t partial_floats = num_partial_floats(spec, problem, num_threads);
  if (partial_floats > 0) m.partials = carver.take<float>(partial_floats);
  return m;
}

}  // namespace fovea::cpu
