#include "cuda/backward/sm90.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

#include "fovea/mask.hpp"

#include "core/ceil_div.hpp"
#include "core/check.hpp"
#include "cuda/backward/redo.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/backward/turns.hpp"
#include "cuda/device/shared/backward_spec_sm90.h"
#include "expr/differentiate.hpp"
#include "expr/interval.hpp"
#include "expr/kv_affine.hpp"
#include "expr/kv_limits.hpp"
#include "expr/passes.hpp"

namespace fovea::cuda {
namespace {

/// Above, sums of dk and dv leave no registers.
constexpr std::int64_t kMostHeadDim = 128;
/// Scales below are not folded into exponents.
constexpr float kSmallestScale = 0x1p-100F;

/// A float, a row's delta; sums of dq.
std::int64_t row_bytes(const Sm90BackwardSpec& spec) {
  return 4 + delta_bytes(spec) + (spec.is_staggered ? 8 : 4) * spec.head_dim_qk;
}

bool stores_by_tma(const GradientProblem& g) {
  const Dtype dtype = g.forward.problem.q.dtype;
  for (const TensorSpec* gradient : {&g.dk, &g.dv})
    if (gradient->rank != 0 && gradient->dtype != dtype) return false;
  return (!g.wants_dk() || why_no_tensor_maps({{"dk", &g.dk}}).empty()) &&
         (!g.wants_dv() || why_no_tensor_maps({{"dv", &g.dv}}).empty());
}

/// Rows of the statistics of all heads.
std::int64_t num_rows(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  return num_statistics(g) * f.num_heads_q * (f.is_varlen ? 1 : f.num_sequences);
}

/// Tiles of queries whose two sums two CTAs may leave to each other.
constexpr std::int64_t kMostFinishedKeyTiles = 32;

/// kv_idx <= q_idx, aligned at either end; as a word or as a program.
bool is_causal(const MaskMod& mask) {
  if (mask.is_all_visible()) return false;
  const auto limits_of = [](const MaskMod& of) {
    return expr::kv_limits(expr::simplify(of.expr().shared()));
  };
  const std::optional<expr::KvLimits> limits = limits_of(mask);
  if (!limits || limits->first != nullptr) return false;
  return std::ranges::any_of(std::array{Align::bottom_right, Align::top_left}, [&](Align align) {
    return limits->last == limits_of(causal(align))->last;
  });
}

/// Does each tile of queries have a CTA that adds first and one that adds last, few tiles to each of these?
bool finishes_queries(const GradientProblem& g, bool is_staggered) {
  const ForwardProblem& f = g.forward;
  const Problem& p = f.problem;
  if (!p.is_deterministic || f.is_varlen || !g.wants_dq()) return false;
  // Without keys no CTA would write zeros.
  if (p.seqlen_kv.has_value() || f.seqlen_kv == 0) return false;
  const std::int64_t key_tiles = ceil_div(f.seqlen_kv, kSm90BackwardKeys);
  if (is_staggered) return key_tiles <= kMostFinishedKeyTiles;
  if (!hides_keys(f)) return key_tiles == 1;
  return is_causal(p.mask) && f.seqlen_q <= f.seqlen_kv;
}

/// Are gradients of scores other than those of what the program makes of them?
bool has_slope(const expr::NodePtr& program) {
  const expr::NodePtr derivative = expr::derivative_by_score(program);
  return derivative->op != expr::Op::constant || derivative->float_value != 1;
}

/// Loads whose addresses are registers, for scores one by one.
bool loads_for_each_score(const expr::NodePtr& program) {
  if (expr::score_slope(program) != nullptr) return false;  // a line's are those of rows
  const expr::IntervalProgram formula(program);
  return std::ranges::any_of(formula.nodes(), [](const expr::Node* node) {
    return node->op == expr::Op::load && (expr::reads(*node, expr::Variable::q_idx) ||
                                          expr::reads(*node, expr::Variable::kv_idx) ||
                                          expr::reads(*node, expr::Variable::score));
  });
}

/// What takes registers beside sums and scores: weights of gradients that are not P, what is loaded for each score.
bool needs_registers(const GradientProblem& g) {
  const Problem& p = g.forward.problem;
  const expr::NodePtr program = expr::simplify(p.score.expr().shared());
  return p.dropout.p > 0 || has_slope(program) || loads_for_each_score(program);
}

/// Of sum_ends.
std::int64_t num_end_words(const GradientProblem& g, const Sm90BackwardSpec& spec) {
  const ForwardProblem& f = g.forward;
  if (!spec.is_staggered || !spec.finishes_queries) return 0;
  return f.num_sequences * f.num_heads_q * ceil_div(f.seqlen_q, std::int64_t{spec.tile_q});
}

/// Which tiles of pairs were visited; which tiles of their sums are computed again, behind a word for all of them.
std::int64_t num_pair_words(const GradientProblem& g, const Sm90BackwardSpec& spec) {
  return spec.stores_pairs ? num_pair_tiles(g) + 1 + num_pair_sum_tiles(g) : 0;
}

/// Progress; behind it ends of sums and, where tiles may be computed again, the words that stand for them; those of
/// pairs.
std::int64_t num_all_words(const GradientProblem& g, const Sm90BackwardSpec& spec) {
  return num_key_words(g) + num_end_words(g, spec) + (asks_redo(g) ? num_redo_words(g) : 0) +
         num_pair_words(g, spec);
}

/// Tiles of rows of all heads; packed: a bound, whatever the lengths of the sequences.
std::uint32_t num_tiles(const ForwardProblem& f, std::int64_t length, std::int64_t rows,
                        std::int64_t heads) {
  const std::int64_t tiles = !f.is_varlen  ? f.num_sequences * ceil_div(length, rows)
                             : length == 0 ? 0
                                           : length / rows + f.num_sequences + 1;
  return static_cast<std::uint32_t>(tiles * heads);
}

const Sm90BackwardSpec& spec_of(const BackwardPlan& plan) {
  const auto main = std::ranges::find(plan.steps, KernelRole::main, &BackwardStep::role);
  FOVEA_ASSERT(main != plan.steps.end());
  return *main->spec.key_walk();
}

}  // namespace

std::optional<Refusal> Sm90Backward::refuses(const GradientProblem& g, const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(g, device)) return refusal;
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  return refuses_key_walk(g);
}

std::optional<Refusal> refuses_key_walk(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  const Problem& p = f.problem;
  if (auto refusal = refuses_head_dims(f, kMostHeadDim)) return refusal;
  if (f.softmax_scale < kSmallestScale) {
    return Refusal{fmt::format("softmax_scale is {}; expected at least 2^-100", f.softmax_scale)};
  }
  if (f.seqlen_q * f.group >= kMostPositions)
    return Refusal{
        fmt::format("{} rows share a kv head; expected fewer than 2^28", f.seqlen_q * f.group)};
  const std::string why =
      why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"dout", &g.dout}});
  if (!why.empty()) return Refusal{why};
  return std::nullopt;
}

Sm90BackwardSpec key_walk_spec(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  Sm90BackwardSpec spec{{common_spec(g)}};
  const std::int64_t widest = std::max(f.head_dim_qk, f.head_dim_v);
  spec.head_dim_qk = spec.head_dim_v = static_cast<std::int32_t>(panels_of(widest));
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.is_deterministic = f.problem.is_deterministic;
  spec.has_origins = has_program(g);
  spec.hides_keys = hides_keys(f);
  spec.asks_redo = asks_redo(g);
  return spec;
}

void set_walks(const GradientProblem& g, Sm90BackwardSpec& spec) {
  spec.is_staggered = is_staggered(g.forward, kSm90BackwardKeys, spec.tile_q);
  spec.finishes_queries = finishes_queries(g, spec.is_staggered);
}

std::vector<BackwardStep> Sm90Backward::choose(const GradientProblem& g,
                                               const DeviceTraits& device) {
  if (!g.wants_dq() && !g.wants_dk() && !g.wants_dv()) return {};
  Sm90BackwardSpec spec = key_walk_spec(g);
  spec.spares_registers = needs_registers(g);
  spec.tile_q = spec.head_dim_qk == 128 || spec.spares_registers ? 64 : 128;
  spec.num_warps = spec.is_deterministic ? 16 : 12;
  spec.writes_elements = !stores_by_tma(g);
  set_walks(g, spec);
  spec.stores_pairs = bias_of_pairs(g).has_value();
  BackwardStep main{KernelRole::main, spec,
                    static_cast<std::size_t>(sm90_backward_layout(spec).bytes)};
  main.multiplies_by_wgmma = true;
  return with_steps_around(main, g, device);
}

std::vector<BackwardStep> with_steps_around(const BackwardStep& main, const GradientProblem& g,
                                            const DeviceTraits& device) {
  const Sm90BackwardSpec& spec = *main.spec.key_walk();
  Sm90BackwardSpec rows = spec;
  rows.num_warps = kSm90RowWarps;
  BackwardStep prepare{KernelRole::prepare, rows};
  prepare.header = "sm90/backward/prepare_rows.cuh";
  prepare.entry = "sm90::prepare_rows";
  prepare.params = "PrepareRowsParams";
  std::vector<BackwardStep> steps = {main, prepare};
  if (!spec.finishes_queries) {
    BackwardStep& finish = steps.emplace_back(KernelRole::convert, rows,
                                              static_cast<std::size_t>(sm90_finish_bytes(spec)));
    finish.header = "sm90/backward/finish_queries.cuh";
    finish.entry = "sm90::finish_queries";
  }
  if (spec.asks_redo) {
    const std::vector<BackwardStep> again = Sm80Backward::choose_redo(g, device);
    steps.insert(steps.end(), again.begin(), again.end());
  }
  if (spec.stores_pairs) {
    BackwardStep& sum = steps.emplace_back(KernelRole::sum_pairs, rows, kSumPairsBytes);
    sum.header = "sm90/backward/sum_pairs.cuh";
    sum.entry = "sm90::sum_pairs";
    sum.params = "SumPairsParams";
  }
  return steps;
}

std::size_t Sm90Backward::scratch_bytes(const std::vector<BackwardStep>& steps,
                                        const GradientProblem& g) {
  if (steps.empty()) return 0;
  const Sm90BackwardSpec& spec = *steps.front().spec.key_walk();
  return static_cast<std::size_t>(num_rows(g) * row_bytes(spec) + 4 * num_all_words(g, spec));
}

Sm90BackwardLaunch Sm90Backward::prepare(const GradientProblem& g, const BackwardPlan& plan,
                                         const AttentionBackward& args, void* workspace,
                                         const TensorMapEncoder& encode) {
  Sm90BackwardLaunch launch;
  launch.common = backward_launch(g, plan, args, workspace);
  if (plan.steps.empty()) return launch;
  const ForwardProblem& f = g.forward;
  const Sm90BackwardSpec& spec = spec_of(plan);
  const TensorView& q = args.forward.q;
  const TensorView& k = args.forward.k;
  const std::int64_t rows = num_rows(g);
  std::byte* at = static_cast<std::byte*>(workspace) + plan.memory.scratch_at;
  const auto take = [&at](std::int64_t bytes) { return (at += bytes) - bytes; };
  Sm90BackwardParams& p = launch.params;
  p.common = launch.common.params;
  p.common.kv_pairs_per_section =
      spec.is_staggered
          ? 1
          : pairs_of_section(p.common.kv_pairs_per_section, spec.is_deterministic, hides_keys(f));
  p.rows.delta = take(rows * delta_bytes(spec));
  p.rows.dq_sums = reinterpret_cast<float*>(take(4 * rows * spec.head_dim_qk));
  if (spec.is_staggered)
    p.rows.dq_round_sums = reinterpret_cast<float*>(take(4 * rows * spec.head_dim_qk));
  p.rows.log_sum = reinterpret_cast<float*>(take(4 * rows));
  const auto take_words = [&](std::int64_t count) {
    return reinterpret_cast<std::int32_t*>(take(4 * count));
  };
  p.rows.progress = take_words(num_key_words(g));
  if (const std::int64_t ends = num_end_words(g, spec)) p.rows.sum_ends = take_words(ends);
  if (spec.asks_redo) place_redo(g, take_words(num_redo_words(g)), p.common);
  if (spec.stores_pairs) {
    p.pairs = {static_cast<std::byte*>(workspace) + plan.memory.captured_at +
                   plan.captured.memory.pairs_at,
               take_words(num_pair_tiles(g))};
    launch.prepare_pairs(plan,
                         take_words(1 + std::int64_t{launch.common.captured.num_dense_tiles}));
  }
  // Those that num_all_words counts, which asks the formula what a call's plan knows.
  const std::int64_t num_words = reinterpret_cast<std::int32_t*>(at) - p.rows.progress;
  launch.prepare = {.from = p.common.rows, .to = p.rows, .num_rows = rows, .num_words = num_words};
  launch.prepare_redo(plan);
  const std::int64_t length_q = q.size(q.rank() - 3);
  const std::int64_t length_kv = k.size(k.rank() - 3);
  launch.num_prepare_ctas = static_cast<std::uint32_t>(rows / kStatisticsRows);
  launch.num_ctas = num_tiles(f, length_kv, kSm90BackwardKeys, f.num_heads_kv);
  if (g.wants_dq() && !spec.finishes_queries)
    launch.num_finish_ctas = num_tiles(f, length_q, spec.tile_q, f.num_heads_q);
  if (launch.num_ctas == 0) return launch;
  // Without queries there is nothing that a tensor map could describe, and nothing is loaded.
  const bool has_queries = length_q > 0 && (f.is_varlen || f.num_sequences > 0);
  p.q = tensor_map(encode, has_queries ? q : k, spec.tile_q);
  p.dout = tensor_map(encode, has_queries ? args.dout : k, spec.tile_q);
  p.k = tensor_map(encode, k, kSm90BackwardKeys);
  p.v = tensor_map(encode, args.forward.v, kSm90BackwardKeys);
  if (spec.writes_elements) return launch;
  constexpr std::int64_t kRowsOfGroup = 64;
  if (g.wants_dk()) p.dk = tensor_map(encode, args.dk, kRowsOfGroup);
  if (g.wants_dv()) p.dv = tensor_map(encode, args.dv, kRowsOfGroup);
  return launch;
}

void Sm90BackwardLaunch::prepare_redo(const BackwardPlan& plan) {
  for (std::size_t i = 0; i < plan.steps.size(); ++i) {
    const BackwardStep& step = plan.steps[i];
    if (!step.is_redo()) continue;
    (step.role == KernelRole::redo_keys ? redo_keys : redo_queries) =
        redo_launch(plan, step, params.common, common.num_ctas[i]);
  }
}

void Sm90BackwardLaunch::prepare_pairs(const BackwardPlan& plan, std::int32_t* redo_words) {
  CapturedLaunch& captured = common.captured;
  const DenseGradient& to = captured.params.dense;
  const std::int32_t num_tiles = static_cast<std::int32_t>(captured.num_dense_tiles);
  captured.params.dense_redo = {redo_words, redo_words + 1, num_tiles};
  captured.num_dense_ctas = std::min(
      captured.num_dense_tiles,
      static_cast<std::uint32_t>(plan.captured.dense_spec.ctas_per_sm * plan.device.num_sms));
  sum_pairs = {params.common.forward, params.pairs, to, captured.params.dense_redo};
  num_sum_ctas = static_cast<std::uint32_t>(ceil_div(to.num_q, kPairQueries) *
                                            ceil_div(to.num_kv, kSm90BackwardKeys) *
                                            to.num_batches * to.num_heads);
}

KernelLaunches Sm90BackwardLaunch::launches(const BackwardPlan& plan) const {
  KernelLaunches all;
  common.add_before(all);
  const auto add = [&](KernelRole role, const auto& of, std::uint32_t num) {
    const auto step = std::ranges::find(plan.steps, role, &BackwardStep::role);
    if (step == plan.steps.end()) return;
    KernelLaunch launch = step_launch(*step, of, num);
    launch.is_pdl = Sm90Backward::kIsChained;  // each waits for the one before it
    all.add(launch);
  };
  add(KernelRole::prepare, prepare, num_prepare_ctas);
  add(KernelRole::main, params, num_ctas);
  add(KernelRole::convert, params, num_finish_ctas);
  add(KernelRole::redo_keys, redo_keys.params, redo_keys.num_ctas);
  add(KernelRole::redo_queries, redo_queries.params, redo_queries.num_ctas);
  add(KernelRole::sum_pairs, sum_pairs, num_sum_ctas);
  common.add_after(all);
  return all;
}

}  // namespace fovea::cuda
