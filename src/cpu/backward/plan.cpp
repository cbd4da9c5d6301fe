// The choice of a kernel for gradients, how work is cut, and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>

#include "fovea/error.hpp"

#include "cpu/attention_backward.hpp"
#include "cpu/backward/workspace.hpp"
#include "cpu/candidates.hpp"
#include "cpu/kernels/gradient.hpp"
#include "cpu/quantized/attention_quantized_backward.hpp"
#include "expr/differentiate.hpp"
#include "expr/passes.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kTileKv = 128;
constexpr std::int64_t kLeastChunk = 512;  // keys: dk and dv sums of 256 KB at head_dim 64
constexpr std::size_t kPanelBudget =
    320 * 1024;  // bytes of panels that share a walk: second-level cache
constexpr std::int64_t kMaxPanels = 4;
constexpr std::int64_t kTasksPerWorker = 2;  // (sequence, kv head) pairs that keep workers busy
constexpr std::int64_t kManyPairs = 32;      // the same where threads must not matter
constexpr std::int64_t kMaxSideBySideFloats = 1 << 28;  // dq sums beyond this run in turn

std::optional<Refusal> refuses(const GradientProblem& g, const Candidate& candidate) {
  // Rounded to bf16, wider inputs with outliers lose more in dv than the tolerance of bf16 products allows (seen on AMX
  // hardware).
  const PanelKernels* kernels = gradient_panel_kernels(candidate.target);
  const Dtype dtype = g.forward.problem.q.dtype;
  if (kernels != nullptr && kernels->product == Dtype::bf16 && dtype != Dtype::bf16) {
    return Refusal{
        fmt::format("inputs are {}; gradients in products of bf16 take bf16", name(dtype))};
  }
  if (candidate.is_split) return Refusal{"gradients of f16 are computed in f32"};
  return candidate.refuses(g.forward, candidate);
}

BackwardSpec choose(const GradientProblem& g, CpuTarget target) {
  BackwardSpec spec{.target = target,
                    .lanes = gradient_panel_kernels(target)->lanes,
                    .panels = 1,
                    .tile_kv = kTileKv};
  const ForwardProblem& f = g.forward;
  const auto bytes =
      static_cast<std::size_t>(spec.lanes * (3 * f.head_dim_qk + 2 * f.head_dim_v)) * sizeof(float);
  spec.panels =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(kPanelBudget / bytes), 1, kMaxPanels);
  return spec;
}

/// With captured gradients the number of threads decides nothing: their sums depend on the schedule.
bool run_side_by_side(const GradientProblem& g, std::int64_t max_chunks, int num_threads) {
  const ForwardProblem& f = g.forward;
  if (max_chunks == 1) return false;
  const std::int64_t pairs = f.num_sequences * f.num_heads_kv;
  const std::int64_t floats = max_chunks * f.total_q * f.num_heads_q * f.head_dim_qk;
  if (g.wants_dq() && floats > kMaxSideBySideFloats) return false;
  if (!g.captured.empty()) return pairs < kManyPairs;
  return num_threads > 1 && pairs < kTasksPerWorker * num_threads;
}

BackwardSchedule make_schedule(const GradientProblem& g, const BackwardSpec& spec,
                               const CapturedSumsPlan& captured, int num_threads) {
  const ForwardProblem& f = g.forward;
  BackwardSchedule s;
  s.max_chunks =
      std::clamp<std::int64_t>(ceil_div(f.seqlen_kv, chunk_keys(spec, f.seqlen_kv)), 1, kMaxChunks);
  // A shorter sequence may have more chunks than the longest: 4097 keys are 7 chunks, 4096 are 8.
  if (f.is_varlen || f.problem.seqlen_kv)
    s.max_chunks = std::clamp<std::int64_t>(ceil_div(f.seqlen_kv, kLeastChunk), 1, kMaxChunks);
  s.is_side_by_side = run_side_by_side(g, s.max_chunks, num_threads);
  s.by_sequence = captured.by_sequence;
  s.by_head = captured.by_head;
  // Chunks of sequences of different lengths begin at different keys.
  const bool are_chunks_alike = !f.is_varlen || s.by_sequence;
  s.by_chunk = s.is_side_by_side && captured.by_key && are_chunks_alike;
  s.num_groups = (s.by_sequence ? f.num_sequences : 1) * (s.by_head ? f.num_heads_kv : 1) *
                 (s.by_chunk ? s.max_chunks : 1);
  s.num_tasks = captured.max_tasks == 0 ? s.num_groups : std::min(s.num_groups, captured.max_tasks);
  return s;
}

/// Captured tensors that are added have a factor of 1; an error of delta is as small in their gradients as in dq.
bool sums_delta(const GradientProblem& g, const BackwardPlan& plan) {
  const bool has_factors = std::ranges::any_of(
      plan.captured.sites, [](const CapturedSite& site) { return !site.derivative.empty(); });
  const bool is_out_exact = g.forward.problem.out.dtype == Dtype::f32 &&
                            gradient_panel_kernels(plan.spec.target)->product == Dtype::f32;
  return has_factors && !is_out_exact;
}

void prepare_programs(const GradientProblem& g, BackwardPlan& plan) {
  const ScoreMod& score = g.forward.problem.score;
  const MaskMod& mask = g.forward.problem.mask;
  if (!score.is_identity()) {
    plan.score = {score.expr().shared(), score.captures()};
    const expr::NodePtr derivative = expr::derivative_by_score(score.expr().shared());
    if (derivative->op != expr::Op::constant || derivative->float_value != 1)
      plan.derivative = {derivative, score.captures()};
    plan.reads_score = expr::reads(*derivative, expr::Variable::score);
    if (!g.captured.empty()) plan.reads_score = true;
  }
  if (!mask.is_all_visible()) plan.mask = {mask.expr().shared(), mask.captures()};
  plan.captured = plan_captured_sums(g, plan.spec.tile_kv, plan.spec.lanes,
                                     gradient_panel_kernels(plan.spec.target)->vector_lanes);
  plan.sums_delta = sums_delta(g, plan);
  plan.program_bytes = plan.captured.program_bytes;
  for (const BoundTape* tape : {&plan.score, &plan.mask, &plan.derivative}) {
    if (tape->empty()) continue;
    plan.program_bytes = std::max(
        plan.program_bytes,
        program_scratch_bytes(tape->tape, plan.spec.tile_kv, static_cast<int>(plan.spec.lanes)));
  }
  plan.mapper.emplace(mask::BlockMapper::of_formula(mask, kSubTileKeys));
}

std::size_t workspace_bytes(const GradientProblem& g, const BackwardPlan& plan) {
  Carver carver(nullptr);
  BackwardMemory::carve(carver, g, plan.schedule);
  [[maybe_unused]] const CapturedSums sums(g, plan.captured, plan.schedule.num_tasks, nullptr,
                                           carver);
  for (int worker = 0; worker < plan.num_workers; ++worker) BackwardScratch::carve(carver, g, plan);
  return carver.used();
}

}  // namespace

std::int64_t chunk_keys(const BackwardSpec& spec, std::int64_t seqlen_kv) {
  const std::int64_t even = ceil_div(ceil_div(seqlen_kv, kMaxChunks), spec.tile_kv) * spec.tile_kv;
  return std::max(kLeastChunk, even);
}

BackwardPlan try_plan_backward(const GradientProblem& problem, int num_threads) {
  if (!problem.forward.problem.quant.is_none())
    return try_plan_quantized_backward(problem, num_threads);
  BackwardPlan plan;
  for (const Candidate& candidate : forward_candidates()) {
    std::string name = fmt::format("cpu/attention_backward {}", fovea::name(candidate.target));
    if (const auto refusal = refuses(problem, candidate)) {
      plan.refused.push_back({std::move(name), refusal->reason});
      continue;
    }
    plan.candidate = std::move(name);
    plan.num_workers = num_threads;
    plan.spec = choose(problem, candidate.target);
    prepare_programs(problem, plan);
    plan.schedule = make_schedule(problem, plan.spec, plan.captured, num_threads);
    plan.workspace_bytes = workspace_bytes(problem, plan);
    break;
  }
  return plan;
}

BackwardPlan plan_backward(const GradientProblem& problem, int num_threads) {
  BackwardPlan plan = try_plan_backward(problem, num_threads);
  if (!plan.candidate.empty()) return plan;
  std::string message = "plan_backward: no kernel for this problem on cpu:";
  for (const auto& refused : plan.refused)
    message += fmt::format("\n  {}  {}", refused.candidate, refused.reason);
  throw Unsupported(message);
}

}  // namespace fovea::cpu
