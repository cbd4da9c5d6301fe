#include "cpu/candidates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/env.hpp"
#include "cpu/features.hpp"
#include "cpu/forward/workspace.hpp"
#include "problem/head_dim.hpp"
#include "quant/row_codes.hpp"

namespace fovea::cpu {
namespace {

constexpr std::int64_t kTileKv = 128;  // a panel of scores stays in 24 KB of L1
constexpr std::int64_t kTilesPerSplit =
    16;  // 2048 keys: 1 MB of K and V at head_dim 64 in fp32, long against a merge
// Queries and sums of an item's panels: with a tile of K and V they fit in a second-level cache of 1 MB.
constexpr std::size_t kPanelBudget = 512 << 10;
constexpr std::int64_t kLeastPanels = 4;  // below, loads of K and V show
constexpr std::int64_t kMaxPartialFloats =
    1 << 20;  // of a worker: beyond, splits run in turn, to the same bits
constexpr std::int64_t kItemsPerWorker =
    4;  // below that, items are cut smaller: the last one alone decides the end

bool is_bf16_target(CpuTarget target) {
  return target == CpuTarget::avx512_bf16 || target == CpuTarget::amx_bf16;
}

/// bf16 only where q, k and v all are; a cache may differ from q. Codes times their scales are f32.
Dtype widest_input(const Problem& p) {
  for (const Dtype dtype : {p.q.dtype, p.k.dtype, p.v.dtype}) {
    if (dtype != Dtype::bf16) return dtype;
  }
  return Dtype::bf16;
}

std::optional<Refusal> refuses_product(const ForwardProblem& f, CpuTarget target,
                                       CpuTarget wanted) {
  const Dtype widest = widest_input(f.problem);
  const bool is_bf16_input = widest == Dtype::bf16;
  const ComputeDtype compute = f.problem.compute_dtype;
  if (!is_bf16_target(target)) {
    if (compute == ComputeDtype::bf16)
      return Refusal{"compute_dtype is bf16 and this target multiplies in f32"};
    return std::nullopt;
  }
  if (compute == ComputeDtype::f32) return Refusal{"compute_dtype is f32"};
  if (compute == ComputeDtype::bf16 || wanted == target) {
    if (!is_bf16_input && compute != ComputeDtype::bf16) {
      return Refusal{
          fmt::format("inputs are {}; compute_dtype bf16 would round them", name(widest))};
    }
    return std::nullopt;
  }
  if (!is_bf16_input) return Refusal{fmt::format("inputs are {}", name(widest))};
  if (best_bf16_target() != target) return Refusal{"f32 products are faster on this processor"};
  return std::nullopt;
}

/// Splitting is exact for numbers of 16 bits; bf16 alone is multiplied as it is.
std::optional<Refusal> refuses_split(const Problem& p) {
  bool has_f16 = false;
  for (const Dtype dtype : {p.q.dtype, p.k.dtype, p.v.dtype}) {
    if (dtype == Dtype::f32 || quant::is_code(dtype))
      return Refusal{fmt::format("inputs are {}", name(dtype))};
    has_f16 = has_f16 || dtype == Dtype::f16;
  }
  if (!has_f16) return Refusal{"no input is f16"};
  if (p.compute_dtype == ComputeDtype::bf16) return Refusal{"compute_dtype is bf16"};
  return std::nullopt;
}

std::optional<Refusal> refuses(const ForwardProblem& f, const Candidate& candidate) {
  const CpuTarget target = candidate.target;
  const CpuTarget wanted = wanted_target(f);
  if (wanted != CpuTarget::automatic && wanted != target) {
    return Refusal{fmt::format("target {} was asked for", name(wanted))};
  }
  if (panel_kernels(target) == nullptr) return Refusal{"this build has no kernels for it"};
  if (const std::string_view missing = missing_for(target); !missing.empty())
    return Refusal{std::string(missing)};
  for (const auto& [label, head_dim] :
       {std::pair{"head_dim_qk", f.head_dim_qk}, std::pair{"head_dim_v", f.head_dim_v}}) {
    if (head_dim > kMaxHeadDim)
      return Refusal{fmt::format("{} {} is above {}", label, head_dim, kMaxHeadDim)};
  }
  return candidate.is_split ? refuses_split(f.problem) : refuses_product(f, target, wanted);
}

ForwardSpec choose(const ForwardProblem& f, const Candidate& candidate, int num_threads) {
  ForwardSpec spec{.target = candidate.target,
                   .is_split = candidate.is_split,
                   .lanes = panel_kernels(candidate.target)->lanes,
                   .tile_kv = kTileKv,
                   .tiles_per_split = kTilesPerSplit};
  const PanelKernels& kernels = forward_kernels(spec);
  // Tiles of AMX want whole strips; vectors take any keys, and a finer map costs more than it saves.
  if (kernels.product == Dtype::f32 && kernels.push == nullptr) spec.map_keys = kSubTileKeys / 2;
  spec.panels = panels_that_share(f, spec, num_threads);
  return spec;
}

std::size_t workspace_bytes(const ForwardSpec& spec, const ForwardProblem& f,
                            std::size_t program_bytes, int num_threads) {
  Carver carver(nullptr);
  ForwardMemory::carve(carver, spec, f, program_bytes, num_threads);
  return carver.used();
}

constexpr Candidate row(std::string_view name, CpuTarget target, bool is_split = false) {
  return {name, target, is_split, refuses, choose, workspace_bytes};
}

constexpr std::array kCandidates = {
    row("cpu/attention_forward amx_bf16", CpuTarget::amx_bf16),
    row("cpu/attention_forward amx_bf16 in parts", CpuTarget::amx_bf16, /*is_split=*/true),
    row("cpu/attention_forward avx512_bf16", CpuTarget::avx512_bf16),
    row("cpu/attention_forward avx512", CpuTarget::avx512),
    row("cpu/attention_forward avx2", CpuTarget::avx2),
    row("cpu/attention_forward neon", CpuTarget::neon),
    row("cpu/attention_forward scalar", CpuTarget::scalar),
};

}  // namespace

CpuTarget wanted_target(const ForwardProblem& f) {
  if (f.problem.cpu_target != CpuTarget::automatic) return f.problem.cpu_target;
  const Environment env = read_environment();
  if (!env.cpu_target) return CpuTarget::automatic;
  const auto target = parse_cpu_target(*env.cpu_target);
  if (!target) {
    throw InvalidArgument(fmt::format(
        "FOVEA_CPU_TARGET is '{}'; expected scalar, avx2, avx512, avx512_bf16, amx_bf16, neon, "
        "avx512_vnni or avx_vnni",
        *env.cpu_target));
  }
  return *target;
}

std::int64_t panels_that_share(const ForwardProblem& f, const ForwardSpec& spec, int num_threads) {
  const PanelKernels& kernels = forward_kernels(spec);
  const std::size_t bytes = kernels.query_bytes(f.head_dim_qk) + kernels.output_bytes(f.head_dim_v);
  const auto fitting = static_cast<std::int64_t>(kPanelBudget / bytes);
  const std::int64_t panels = f.total_q * f.num_heads_q / spec.lanes;
  return std::min(panels_of_an_item(panels, num_threads),
                  std::clamp(fitting, kLeastPanels, kMaxPanels));
}

const PanelKernels& forward_kernels(const ForwardSpec& spec) {
  return spec.is_split ? *panel_kernels_amx_split() : *panel_kernels(spec.target);
}

const PanelKernels& plain_kernels(const ForwardSpec& spec) {
  const bool is_plain = !spec.is_split && !is_bf16_target(spec.target);
  return *panel_kernels(is_plain ? spec.target : CpuTarget::avx512);
}

std::span<const Candidate> forward_candidates() { return kCandidates; }

std::int64_t max_splits(const ForwardSpec& spec, const ForwardProblem& f) {
  const std::int64_t keys_per_split = spec.tile_kv * spec.tiles_per_split;
  return std::max<std::int64_t>(1, (f.seqlen_kv + keys_per_split - 1) / keys_per_split);
}

std::int64_t max_split_rows(const ForwardSpec& spec, const ForwardProblem& f) {
  return std::min(spec.lanes, f.group * f.seqlen_q);
}

std::size_t num_partial_floats(const ForwardSpec& spec, const ForwardProblem& f, int num_threads) {
  const std::int64_t groups = f.num_sequences * f.num_heads_kv;
  const std::int64_t splits = max_splits(spec, f);
  const bool is_busy = groups >= kItemsPerWorker * num_threads;
  const bool can_split = splits > 1 && (f.is_varlen || f.group * f.seqlen_q <= spec.lanes);
  if (num_threads == 1 || is_busy || !can_split) return 0;
  const std::int64_t floats = groups * splits * max_split_rows(spec, f) * (f.head_dim_v + 2);
  return floats <= kMaxPartialFloats * num_threads ? static_cast<std::size_t>(floats) : 0;
}

}  // namespace fovea::cpu
