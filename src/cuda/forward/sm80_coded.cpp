#include "cuda/forward/sm80_coded.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cuda/device/shared/split.h"
#include "cuda/params/tensor_params.hpp"

namespace fovea::cuda {
namespace {

/// Sixteen rows a warp, whatever their number: sums of more leave no registers for the codes that are under way.
constexpr std::int32_t kWarps = 4;
constexpr std::int64_t kRows = 16 * kWarps;
/// Keys of a tile: of wider heads a thread has no registers for its part of more.
constexpr std::int32_t keys_of_tile(std::int32_t widest_head_dim) {
  return widest_head_dim <= 64 ? 64 : widest_head_dim <= 128 ? 32 : 16;
}

CodedSpec with_keys(CodedSpec spec, std::int32_t tile_kv, const DeviceTraits& device) {
  spec.tile_kv = tile_kv;
  const int bytes = sm80_forward_layout(spec).bytes + kReservedSharedBytes;
  spec.ctas_per_sm = std::clamp(device.shared_bytes_per_sm / bytes, 1, 2);
  return spec;
}

}  // namespace

std::optional<Refusal> refuses_codes(const ForwardProblem& f, const DeviceTraits& device) {
  const Problem& p = f.problem;
  for (const auto& [label, spec] : {std::pair{"k", &p.k}, std::pair{"v", &p.v}}) {
    if (codes_of(spec->dtype) == Codes::none) {
      return Refusal{
          fmt::format("{} is {}; this kernel reads codes, i8 or e4m3", label, name(spec->dtype))};
    }
  }
  if (auto refusal = refuses_before(kFirstOfSm80, device)) return refusal;
  if (auto refusal = refuses_numbers_or_codes(f, device)) return refusal;
  if (p.q.dtype == Dtype::f32) return Refusal{"q is f32; expected f16 or bf16"};
  if (p.compute_dtype == ComputeDtype::f32)
    return Refusal{"compute_dtype is f32; this kernel multiplies numbers of 16 bits"};
  if (p.compute_dtype == ComputeDtype::bf16 && p.q.dtype != Dtype::bf16)
    return Refusal{"compute_dtype is bf16 and q is f16; expected one of both"};
  return refuses_head_dims(f, kMaxTensorCoreHeadDim);
}

std::optional<Refusal> refuses_rows_of_codes(const ForwardProblem& f) {
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim != 64 && head_dim != 128)
      return Refusal{fmt::format("{} is {}; expected 64 or 128", label, head_dim)};
  }
  return std::nullopt;
}

std::optional<Refusal> Sm80Coded::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_codes(f, device)) return refusal;
  return refuses_margin(f);
}

CodedSpec Sm80Coded::choose(const ForwardProblem& f, const DeviceTraits& device) {
  CodedSpec spec{{common_spec(f)}};
  spec.k_codes = codes_of(f.problem.k.dtype);
  spec.v_codes = codes_of(f.problem.v.dtype);
  spec.tile_q = kRows;
  spec.num_warps = kWarps;
  spec.stages = 2;
  spec.keeps_queries = spec.head_dim_v <= 128;
  spec.heads_per_tile = packed_heads(f, kRows);
  spec.is_split = has_few_rows(f) && !has_packed_tiles(f) && f.seqlen_kv > kFewestKeysPerSplit;
  return with_keys(spec, keys_of_tile(widest_head_dim(spec)), device);
}

std::vector<CodedSpec> Sm80Coded::alternatives(const ForwardProblem& f,
                                               const DeviceTraits& device) {
  const CodedSpec chosen = choose(f, device);
  return {with_keys(chosen, chosen.tile_kv / 2, device), chosen};
}

std::size_t Sm80Coded::shared_bytes(const CodedSpec& spec) {
  return static_cast<std::size_t>(sm80_forward_layout(spec).bytes);
}

std::size_t Sm80Coded::scratch_bytes(const CodedSpec& spec, const ForwardProblem& f) {
  return partial_bytes(spec, f);
}

CodedLaunch Sm80Coded::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                               const AttentionForward& args, const GrownCache* cache,
                               void* workspace, const TensorMapEncoder&) {
  CodedLaunch launch;
  launch.common = forward_launch(problem, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  const KvCache& coded = cache->cache;
  launch.params = {.common = launch.common.params,
                   .k_scale = scale_param(coded.k_scale),
                   .v_scale = scale_param(coded.v_scale),
                   .are_codes_aligned = is_aligned(coded.k) && is_aligned(coded.v)};
  return launch;
}

KernelLaunches CodedLaunch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  common.add_tables(all);
  KernelLaunch main = common.main_launch(plan, params);
  main.grid = {.x = common.grid.x, .y = common.grid.y};
  all.add(main);
  common.add_combine(plan, all);
  return all;
}

}  // namespace fovea::cuda
