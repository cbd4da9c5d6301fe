#include "cuda/backward/rounded.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/shape.hpp"
#include "cuda/backward/candidates.hpp"
#include "cuda/forward/launch.hpp"
#include "cuda/forward/quantized_recipe.hpp"

namespace fovea::cuda {
namespace {

/// The widest rows that are rounded.
constexpr std::int64_t kMostHeadDim = 128;

TensorSpec dense(Dtype dtype, const TensorSpec& like) {
  TensorSpec spec = make_spec(dtype, shape_of(like));
  spec.device = like.device;
  return spec;
}

std::int64_t bytes_of(const TensorSpec& spec) {
  return spec.num_elements() * static_cast<std::int64_t>(size_bytes(spec.dtype));
}

std::int64_t lse_bytes(const ForwardProblem& f) {
  return f.total_q * f.num_heads_q * static_cast<std::int64_t>(sizeof(float));
}

/// Of this place in workspace, dense.
TensorView anew(const TensorView& given, void* workspace, std::size_t at) {
  return {static_cast<void*>(static_cast<std::byte*>(workspace) + at),
          dense(given.dtype(), given.spec())};
}

}  // namespace

std::optional<Refusal> refuses_rounding(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_recipe(f.problem.quant)) return refusal;
  if (auto refusal = refuses_16_bit(without_recipe(f), device)) return refusal;
  const std::int64_t widest =
      sums_codes(f.problem.quant) ? std::max(f.head_dim_qk, f.head_dim_v) : f.head_dim_qk;
  if (widest > kMostHeadDim)
    return Refusal{
        fmt::format("rows of {} are rounded; expected at most {}", widest, kMostHeadDim)};
  if (num_quantizing_ctas(f) > std::int64_t{0x7fffffff}) return Refusal{"more than 2^31 tiles"};
  return std::nullopt;
}

RoundedGradients rounded_gradients(const GradientProblem& g) {
  RoundedGradients rounded{.problem = g, .spec = quantize_numbers_spec(g.forward)};
  ForwardProblem& f = rounded.problem.forward;
  f = without_recipe(f);
  Problem& p = f.problem;
  p.q = rounded_spec(p.q, rounded.spec.head_dim_qk);
  p.k = rounded_spec(p.k, rounded.spec.head_dim_qk);
  if (rounded.spec.head_dim_v > 0) p.v = rounded_spec(p.v, rounded.spec.head_dim_v);
  p.out = dense(p.out.dtype, p.out);
  return rounded;
}

std::size_t place_rounded(const GradientProblem& g, std::size_t steps_bytes,
                          RoundedGradients& rounded) {
  const ForwardProblem& f = rounded.problem.forward;
  const std::size_t steps = std::max(steps_bytes, rounded.forward.workspace_bytes);
  rounded.numbers_at = part_bytes(static_cast<std::int64_t>(steps));
  rounded.out_at = rounded.numbers_at + quantized_bytes(rounded.spec, g.forward);
  rounded.lse_at = rounded.out_at + part_bytes(bytes_of(f.problem.out));
  return rounded.lse_at + part_bytes(lse_bytes(f));
}

RoundedCall rounded_call(const GradientProblem& g, const BackwardPlan& plan,
                         const AttentionBackward& args, void* workspace) {
  const RoundedGradients& rounded = *plan.rounded;
  RoundedCall call{.rounding = quantize_kv_launch(
                       rounded.spec, g.forward, call_params(g.forward, args.forward, nullptr),
                       static_cast<std::byte*>(workspace) + rounded.numbers_at),
                   .args = args};
  call.rounding.overlaps = plan.device.compute_capability() >= kFirstThatOverlaps;
  AttentionForward& forward = call.args.forward;
  const RoundedTensors tensors = rounded_tensors(call.rounding, args.forward);
  forward.q = tensors.q;
  forward.k = tensors.k;
  forward.v = tensors.v;
  forward.out = anew(args.forward.out, workspace, rounded.out_at);
  forward.lse = anew(args.forward.lse, workspace, rounded.lse_at);
  forward.row_max = {};
  forward.quant = {};
  return call;
}

KernelLaunches RoundedCall::launches() const {
  KernelLaunches all;
  if (rounding.num_ctas > 0) rounding.add_to(all);
  return all;
}

void attention_rounded_backward(const GradientProblem& g, const BackwardPlan& plan,
                                const AttentionBackward& args, void* workspace, void* stream) {
  FOVEA_ASSERT(plan.kernels != nullptr);
  const RoundedGradients& rounded = *plan.rounded;
  const RoundedCall call = rounded_call(g, plan, args, workspace);
  {
    const driver::Stream handle(stream);
    const driver::ContextScope scope(plan.kernels->context(), handle.handle());
    enqueue(*plan.kernels, call.launches(), handle);
  }
  attention_forward(rounded.problem.forward, rounded.forward, call.args.forward, workspace, stream);
  backward_candidate_named(plan.candidate)
      .launch(rounded.problem, plan, call.args, workspace, stream);
}

}  // namespace fovea::cuda
