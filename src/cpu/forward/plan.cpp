// The choice of a kernel and what it needs: asked once per problem.
#include <fmt/format.h>

#include <algorithm>

#include "fovea/error.hpp"

#include "core/check.hpp"
#include "cpu/attention_forward.hpp"
#include "cpu/kernels/panel.hpp"
#include "cpu/program.hpp"
#include "cpu/quantized/attention_quantized.hpp"

namespace fovea::cpu {

void prepare_programs(const ForwardProblem& f, ForwardPlan& plan) {
  const ScoreMod& score = f.problem.score;
  const MaskMod& mask = f.problem.mask;
  if (!score.is_identity()) plan.score = {score.expr().shared(), score.captures()};
  if (!mask.is_all_visible()) plan.mask = {mask.expr().shared(), mask.captures()};
  const int lanes = static_cast<int>(plan.spec.lanes);
  for (const BoundTape* tape : {&plan.score, &plan.mask}) {
    if (tape->empty()) continue;
    plan.program_bytes =
        std::max(plan.program_bytes, program_scratch_bytes(tape->tape, plan.spec.tile_kv, lanes));
  }
  plan.mapper.emplace(mask::BlockMapper::of_formula(mask, plan.spec.map_keys));
}

ForwardPlan try_plan_forward(const ForwardProblem& problem, int num_threads) {
  if (!problem.problem.quant.is_none()) return try_plan_quantized(problem, num_threads);
  ForwardPlan plan;
  for (const Candidate& candidate : forward_candidates()) {
    if (const auto refusal = candidate.refuses(problem, candidate)) {
      plan.refused.push_back({std::string(candidate.name), refusal->reason});
      continue;
    }
    plan.candidate = candidate.name;
    plan.num_workers = num_threads;
    plan.spec = candidate.choose(problem, candidate, num_threads);
    prepare_programs(problem, plan);
    plan.workspace_bytes =
        candidate.workspace_bytes(plan.spec, problem, plan.program_bytes, num_threads);
    break;
  }
  return plan;
}

ForwardPlan plan_forward(const ForwardProblem& problem, int num_threads) {
  ForwardPlan plan = try_plan_forward(problem, num_threads);
  if (!plan.candidate.empty()) return plan;
  std::string message = "plan: no kernel for this problem on cpu:";
  for (const auto& refused : plan.refused)
    message += fmt::format("\n  {}  {}", refused.candidate, refused.reason);
  throw Unsupported(message);
}

}  // namespace fovea::cpu
