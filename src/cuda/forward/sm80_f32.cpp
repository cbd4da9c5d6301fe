#include "cuda/forward/sm80_f32.hpp"

#include <fmt/format.h>

#include <array>

#include "cuda/device/shared/split.h"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kMaxHeadDim = 512;

}  // namespace

std::optional<Refusal> Sm80ForwardF32::refuses(const ForwardProblem& f,
                                               const DeviceTraits& device) {
  if (auto refusal = refuses_any(f, device)) return refusal;
  if (auto refusal = refuses_margin(f)) return refusal;
  if (f.problem.compute_dtype == ComputeDtype::bf16)
    return Refusal{"compute_dtype is bf16; this kernel multiplies f32"};
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kMaxHeadDim)
      return Refusal{fmt::format("{} is {}; expected at most {}", label, head_dim, kMaxHeadDim)};
  }
  const std::size_t bytes = shared_bytes(choose(f, device));
  if (bytes > static_cast<std::size_t>(device.shared_bytes_per_cta)) {
    return Refusal{
        fmt::format("tiles of these head dims take {} bytes of shared memory; there are {}", bytes,
                    device.shared_bytes_per_cta)};
  }
  return std::nullopt;
}

PlainSpec Sm80ForwardF32::choose(const ForwardProblem& f, const DeviceTraits&) {
  PlainSpec spec{common_spec(f)};
  spec.tile_q = 32;
  spec.tile_kv = 32;
  spec.num_warps = 4;
  spec.stages = 1;
  spec.ctas_per_sm = 1;
  spec.heads_per_tile = packed_heads(f, spec.tile_q);
  spec.is_split =
      !f.is_varlen && f.group * f.seqlen_q <= spec.tile_q && f.seqlen_kv > kFewestKeysPerSplit;
  return spec;
}

/// Of f32 inputs, which have no other kernel: those of 16 bits come here for head dims that leave no room for more.
std::vector<PlainSpec> Sm80ForwardF32::alternatives(const ForwardProblem& f,
                                                    const DeviceTraits& device) {
  const PlainSpec chosen = choose(f, device);
  std::vector<PlainSpec> specs;
  for (const auto& [tile_q, tile_kv] : {std::pair{32, 64}, {64, 32}, {64, 64}}) {
    PlainSpec spec = chosen;
    spec.tile_q = tile_q;
    spec.tile_kv = tile_kv;
    spec.num_warps = tile_q / 8;  // four threads to a row
    spec.heads_per_tile = packed_heads(f, tile_q);
    if (shared_bytes(spec) <= static_cast<std::size_t>(device.shared_bytes_per_cta))
      specs.push_back(spec);
  }
  return specs;
}

std::size_t Sm80ForwardF32::shared_bytes(const PlainSpec& spec) {
  return static_cast<std::size_t>(sm80_plain_shared_bytes(spec));
}

std::size_t Sm80ForwardF32::scratch_bytes(const PlainSpec& spec, const ForwardProblem& f) {
  return partial_bytes(spec, f);
}

ForwardLaunch Sm80ForwardF32::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                      const AttentionForward& args, const GrownCache* cache,
                                      void* workspace, const TensorMapEncoder&) {
  ForwardLaunch launch = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch);
  return launch;
}

}  // namespace fovea::cuda
