#include "cuda/backward/sm90_wide.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "cuda/backward/sm80.hpp"

namespace fovea::cuda {
namespace {

/// Above, sums of 64 rows leave no registers.
constexpr std::int64_t kMostHeadDim = 256;
/// Up to here sm90/attention_backward sums dk and dv of 128 keys, and adds dq to memory.
constexpr std::int64_t kNarrowHeadDim = 128;

/// Of the walk, without what it owns.
Sm90WideBackwardSpec spec_without_owner(const GradientProblem& g) {
  Sm90WideBackwardSpec spec{{common_spec(g)}};
  const ForwardProblem& f = g.forward;
  spec.head_dim_qk = static_cast<std::int32_t>(panels_of(f.head_dim_qk));
  spec.head_dim_v = static_cast<std::int32_t>(panels_of(f.head_dim_v));
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.has_origins = has_program(g);
  spec.asks_redo = asks_redo(g);
  spec.num_warps = 12;
  spec.tile_walked = kSm90WideRows;
  return spec;
}

bool fits(const Sm90WideBackwardSpec& spec, const DeviceTraits& device) {
  return sm90_wide_backward_layout(spec).bytes <= device.shared_bytes_per_cta;
}

/// As many stages as there is room for, those of scores first.
BackwardStep step_of(Gradients part, Sm90WideBackwardSpec spec, const DeviceTraits& device) {
  constexpr std::int32_t kMostStages = 3;
  set_gradients(part, spec);
  spec.tile_owned = (spec.owns_keys ? 1 : 2) * kSm90WideRows;
  spec.stages = spec.v_stages = 1;
  for (bool has_grown = true; has_grown;) {
    has_grown = false;
    for (std::int32_t Sm90WideBackwardSpec::*stages :
         {static_cast<std::int32_t Sm90WideBackwardSpec::*>(&OwnerSpec::stages),
          &Sm90WideBackwardSpec::v_stages}) {
      Sm90WideBackwardSpec larger = spec;
      ++(larger.*stages);
      if (larger.*stages > kMostStages || !fits(larger, device)) continue;
      spec = larger;
      has_grown = true;
    }
  }
  BackwardStep step{role_of(part), spec,
                    static_cast<std::size_t>(sm90_wide_backward_layout(spec).bytes)};
  step.multiplies_by_wgmma = true;
  return step;
}

BackwardStep clear_step(Sm90WideBackwardSpec spec) {
  spec.num_warps = kClearThreads / 32;
  BackwardStep step{KernelRole::prepare, spec};
  step.header = "sm90/backward/wide/clear_words.cuh";
  step.entry = "sm90::clear_words";
  step.params = "ClearWordsParams";
  return step;
}

}  // namespace

std::optional<Refusal> Sm90WideBackward::refuses(const GradientProblem& g,
                                                 const DeviceTraits& device) {
  if (auto refusal = refuses_16_bit(g, device)) return refusal;
  const ForwardProblem& f = g.forward;
  if (device.compute_capability() != 90) {
    return Refusal{
        fmt::format("compute capability is {}.{}; expected 9.0", device.major, device.minor)};
  }
  if (auto refusal = refuses_head_dims(f, kMostHeadDim)) return refusal;
  if (std::max(f.head_dim_qk, f.head_dim_v) <= kNarrowHeadDim)
    return Refusal{fmt::format("head dims are {} and {}; expected one above {}", f.head_dim_qk,
                               f.head_dim_v, kNarrowHeadDim)};
  const Problem& p = f.problem;
  const std::string why =
      why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"dout", &g.dout}});
  if (!why.empty()) return Refusal{why};
  return std::nullopt;
}

std::vector<BackwardStep> Sm90WideBackward::choose(const GradientProblem& g,
                                                   const DeviceTraits& device) {
  const Sm90WideBackwardSpec spec = spec_without_owner(g);
  std::vector<BackwardStep> steps;
  // One walk even where one of dk and dv is not wanted: it finds both.
  if (g.wants_dk() || g.wants_dv()) steps.push_back(step_of(Gradients::dk_and_dv, spec, device));
  if (g.wants_dq()) steps.push_back(step_of(Gradients::dq, spec, device));
  if (steps.empty() || !spec.asks_redo) return steps;
  steps.push_back(clear_step(spec));
  const std::vector<BackwardStep> again = Sm80Backward::choose_redo(g, device);
  steps.insert(steps.end(), again.begin(), again.end());
  return steps;
}

std::size_t Sm90WideBackward::scratch_bytes(const std::vector<BackwardStep>& steps,
                                            const GradientProblem& g) {
  if (steps.empty() || !asks_redo(g)) return 0;
  return 4 * static_cast<std::size_t>(num_redo_words(g));
}

Sm90WideBackwardLaunch Sm90WideBackward::prepare(const GradientProblem& g, const BackwardPlan& plan,
                                                 const AttentionBackward& args, void* workspace,
                                                 const TensorMapEncoder& encode) {
  Sm90WideBackwardLaunch launch;
  launch.common = backward_launch(g, plan, args, workspace);
  if (plan.steps.empty()) return launch;
  Sm90WideBackwardParams& p = launch.params;
  p.common = launch.common.params;
  if (asks_redo(g)) {
    auto* const words = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) +
                                                        plan.memory.scratch_at);
    place_redo(g, words, p.common);
    launch.clear = {.words = words, .count = num_redo_words(g)};
    constexpr std::int64_t kWordsOfCta = kClearThreads * kClearedWords;
    launch.num_clear_ctas =
        static_cast<std::uint32_t>((launch.clear.count + kWordsOfCta - 1) / kWordsOfCta);
  }
  launch.prepare_redo(plan);
  // Without rows there is nothing that a tensor map could describe, and nothing is loaded.
  const TensorView& q = args.forward.q;
  const TensorView& k = args.forward.k;
  const bool has_queries = q.spec().num_elements() > 0;
  const bool has_keys = k.spec().num_elements() > 0;
  if (!has_queries && !has_keys) return launch;
  p.q = tensor_map(encode, has_queries ? q : k, kSm90WideRows);
  p.dout = tensor_map(encode, has_queries ? args.dout : k, kSm90WideRows);
  p.k = tensor_map(encode, has_keys ? k : q, kSm90WideRows);
  p.v = tensor_map(encode, has_keys ? args.forward.v : q, kSm90WideRows);
  return launch;
}

void Sm90WideBackwardLaunch::prepare_redo(const BackwardPlan& plan) {
  redo = redo_launches(plan, params.common, common);
}

KernelLaunches Sm90WideBackwardLaunch::launches(const BackwardPlan& plan) const {
  KernelLaunches all;
  common.add_before(all);
  const auto add = [&](const BackwardStep& step, const auto& of, std::uint32_t num) {
    KernelLaunch launch = step_launch(step, of, num);
    launch.is_pdl = Sm90WideBackward::kIsChained;  // each waits for the one before it
    all.add(launch);
  };
  const auto first = std::ranges::find(plan.steps, KernelRole::prepare, &BackwardStep::role);
  if (first != plan.steps.end()) add(*first, clear, num_clear_ctas);
  for (std::size_t i = 0; i < plan.steps.size(); ++i)
    if (plan.steps[i].is_walk()) add(plan.steps[i], params, common.num_ctas[i]);
  for (std::size_t i = 0; i < plan.steps.size(); ++i)
    if (plan.steps[i].is_redo()) add(plan.steps[i], redo[i].params, redo[i].num_ctas);
  common.add_after(all);
  return all;
}

}  // namespace fovea::cuda
