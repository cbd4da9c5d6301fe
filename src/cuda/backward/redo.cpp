#include "cuda/backward/redo.hpp"

#include <algorithm>

#include "core/ceil_div.hpp"
#include "cuda/backward/candidates.hpp"

namespace fovea::cuda {
namespace {

std::int64_t num_words(const ForwardProblem& f, std::int64_t length, std::int64_t total,
                       std::int64_t heads) {
  const std::int64_t tiles = ceil_div(length, kStatisticsRows);
  return heads * (f.is_varlen ? num_packed_tiles(total, f.num_sequences) : f.num_sequences * tiles);
}

std::int64_t num_query_words(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  return num_words(f, f.seqlen_q, f.is_varlen ? f.problem.q.shape[0] : 0, f.num_heads_q);
}

}  // namespace

bool hides_keys(const ForwardProblem& f) { return f.is_varlen || !f.problem.mask.is_all_visible(); }

bool asks_redo(const GradientProblem& g) {
  return hides_keys(g.forward) || has_program(g) || g.forward.problem.dropout.p > 0;
}

std::int64_t num_key_words(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  return num_words(f, f.seqlen_kv, f.is_varlen ? f.problem.k.shape[0] : 0, f.num_heads_kv);
}

std::int64_t num_redo_words(const GradientProblem& g) {
  return 2 + num_key_words(g) + num_query_words(g);
}

void place_redo(const GradientProblem& g, std::int32_t* words, BackwardParams& params) {
  params.redo_keys = {.any = words, .tiles = words + 1, .num_owned = 0};
  std::int32_t* const of_queries = words + 1 + num_key_words(g);
  params.redo_queries = {.any = of_queries, .tiles = of_queries + 1, .num_owned = 0};
}

RedoLaunch redo_launch(const BackwardPlan& plan, const BackwardStep& step,
                       const BackwardParams& params, std::uint32_t num_tiles) {
  const auto of_machine = static_cast<std::uint32_t>(step.spec->ctas_per_sm * plan.device.num_sms);
  RedoLaunch launch{params, std::min(num_tiles, of_machine)};
  RedoTiles& redo =
      step.role == KernelRole::redo_queries ? launch.params.redo_queries : launch.params.redo_keys;
  redo.num_owned = static_cast<std::int32_t>(num_tiles);
  return launch;
}

RedoLaunches redo_launches(const BackwardPlan& plan, const BackwardParams& params,
                           const BackwardLaunch& common) {
  RedoLaunches all{};
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    if (plan.steps[i].is_redo())
      all[i] = redo_launch(plan, plan.steps[i], params, common.num_ctas[i]);
  }
  return all;
}

}  // namespace fovea::cuda
