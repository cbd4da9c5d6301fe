#include "cuda/backward/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "cuda/backward/launch.hpp"
#include "cuda/backward/sm100.hpp"
#include "cuda/backward/sm80.hpp"
#include "cuda/backward/sm80_f32.hpp"
#include "cuda/backward/sm80_one_walk.hpp"
#include "cuda/backward/sm90.hpp"
#include "cuda/backward/sm90_wide.hpp"
#include "cuda/params/tensor_maps.hpp"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Rows of shared memory are swizzled in units of 32 elements.
std::int32_t padded(std::int64_t head_dim) {
  return static_cast<std::int32_t>((head_dim + 31) / 32 * 32);
}

/// Enqueues what a kernel prepares for a call.
template <typename Kernel>
void launch_call(const GradientProblem& problem, const BackwardPlan& plan,
                 const AttentionBackward& args, void* workspace, void* stream_handle) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  const KernelSet& kernels = *plan.kernels;
  const driver::Stream stream(stream_handle);
  const driver::ContextScope scope(kernels.context(), stream.handle());
  const auto call = [&] {
    if constexpr (requires {
                    Kernel::prepare(problem, plan, args, workspace, TensorMapEncoder());
                  }) {
      return Kernel::prepare(problem, plan, args, workspace,
                             encoder_of(kernels.context().driver()));
    } else {
      return Kernel::prepare(problem, plan, args, workspace);
    }
  }();
  enqueue(kernels, call.launches(plan), stream);
}

template <typename Kernel>
constexpr decltype(BackwardCandidate::alternatives) alternatives_of() {
  if constexpr (requires { Kernel::alternatives; })
    return Kernel::alternatives;
  else
    return nullptr;
}

/// The row of a kernel: its files name it Sm80Backward, ... and give it what a row asks for.
template <typename Kernel>
constexpr BackwardCandidate candidate_of() {
  return {.name = Kernel::kName,
          .header = Kernel::kHeader,
          .entry = Kernel::kEntry,
          .params = Kernel::kParams,
          .has_origins = Kernel::has_origins,
          .is_chained = Kernel::kIsChained,
          .refuses = Kernel::refuses,
          .choose = Kernel::choose,
          .alternatives = alternatives_of<Kernel>(),
          .scratch_bytes = Kernel::scratch_bytes,
          .launch = launch_call<Kernel>};
}

constexpr std::array kCandidates = {candidate_of<Sm90Backward>(), candidate_of<Sm90WideBackward>(),
                                    candidate_of<Sm80OneWalk>(), candidate_of<Sm80Backward>(),
                                    // Behind these until a GPU has seen it.
                                    candidate_of<Sm100Backward>(), candidate_of<Sm80BackwardF32>()};

}  // namespace

std::optional<Refusal> refuses_any(const GradientProblem& g, const DeviceTraits& device) {
  if (auto refusal = refuses_any(g.forward, device)) return refusal;
  if (auto refusal = refuses_margin(g.forward)) return refusal;
  if (auto reason = captured_refusal(g)) return Refusal{*std::move(reason)};
  return std::nullopt;
}

std::optional<Refusal> refuses_16_bit(const GradientProblem& g, const DeviceTraits& device) {
  if (auto refusal = refuses_any(g, device)) return refusal;
  if (auto refusal = refuses_16_bit(g.forward, device)) return refusal;
  const Dtype dtype = g.forward.problem.q.dtype;
  if (g.dout.dtype == dtype) return std::nullopt;
  return Refusal{fmt::format("dout is {} and q is {}; this kernel multiplies one dtype",
                             name(g.dout.dtype), name(dtype))};
}

BackwardSpec common_spec(const GradientProblem& g) {
  const ForwardProblem& f = g.forward;
  const Problem& p = f.problem;
  BackwardSpec spec;
  spec.element = element_of(p.q.dtype);
  spec.dout_element = element_of(g.dout.dtype);
  spec.head_dim_qk = padded(f.head_dim_qk);
  spec.head_dim_v = padded(f.head_dim_v);
  spec.is_varlen = f.is_varlen;
  spec.has_padded_head_dim = spec.head_dim_qk != f.head_dim_qk || spec.head_dim_v != f.head_dim_v;
  spec.has_dropout = p.dropout.p > 0;
  spec.reads_dropout_seed = spec.has_dropout && p.reads_dropout_seed;
  spec.has_dropout_places = spec.has_dropout && p.has_dropout_places;
  return spec;
}

bool has_program(const GradientProblem& g) { return !g.forward.problem.score.is_identity(); }

std::vector<Gradients> wanted_gradients(const GradientProblem& g, bool sums_both) {
  std::vector<Gradients> parts;
  if (g.wants_dk() && g.wants_dv() && sums_both) {
    parts.push_back(Gradients::dk_and_dv);
  } else {
    if (g.wants_dk()) parts.push_back(Gradients::dk);
    if (g.wants_dv()) parts.push_back(Gradients::dv);
  }
  if (g.wants_dq()) parts.push_back(Gradients::dq);
  return parts;
}

KernelRole role_of(Gradients gradients) {
  if (gradients == Gradients::dq) return KernelRole::queries;
  return gradients == Gradients::dv ? KernelRole::values : KernelRole::main;
}

void set_gradients(Gradients gradients, OwnerSpec& spec) {
  spec.owns_keys = gradients != Gradients::dq;
  spec.sums_scores = gradients != Gradients::dv;
  spec.sums_values = gradients == Gradients::dv || gradients == Gradients::dk_and_dv;
}

std::vector<std::vector<BackwardStep>> combinations(
    const std::vector<std::vector<BackwardStep>>& steps_of_parts) {
  std::vector<std::vector<BackwardStep>> all(1);
  for (const std::vector<BackwardStep>& steps : steps_of_parts) {
    std::vector<std::vector<BackwardStep>> longer;
    for (const std::vector<BackwardStep>& others : all) {
      for (const BackwardStep& step : steps) longer.emplace_back(others).push_back(step);
    }
    all = std::move(longer);
  }
  return all;
}

std::int64_t num_owned_tiles(const OwnerSpec& spec, const GradientProblem& g,
                             const AttentionBackward& args) {
  const ForwardProblem& f = g.forward;
  const TensorView& rows = spec.owns_keys ? args.forward.k : args.forward.q;
  const std::int64_t heads = spec.owns_keys ? f.num_heads_kv : f.num_heads_q;
  const std::int64_t length = rows.size(rows.rank() - 3);
  if (!f.is_varlen)
    return f.num_sequences * heads * ((length + spec.tile_owned - 1) / spec.tile_owned);
  // Every sequence may waste a tile, and so may the rows behind the last one.
  return length == 0 ? 0 : (length / spec.tile_owned + f.num_sequences + 1) * heads;
}

std::span<const BackwardCandidate> backward_candidates() { return kCandidates; }

const BackwardCandidate& backward_candidate_named(std::string_view name) {
  const auto* candidate = std::ranges::find(kCandidates, name, &BackwardCandidate::name);
  FOVEA_ASSERT(candidate != kCandidates.end());
  return *candidate;
}

}  // namespace fovea::cuda
