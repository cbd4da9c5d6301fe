#include "cuda/forward/sm100.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int64_t kWidestHeadDim = 128;
/// Below, rows are padded to whole panels of 64 elements; above, to panels of 32.
constexpr std::int32_t kOnePanel = 64;
constexpr std::int32_t kTileKv = 128;
/// More buffers of keys and values than these have nothing to hide.
constexpr std::int32_t kMostStages = 4, kFewestStages = 2;

bool is_blackwell(const DeviceTraits& device) {
  return device.compute_capability() == 100 || device.compute_capability() == 103;
}

/// Of each 16. Products of 128 columns take as long as all powers by ex2 do on sm_100, those of 64 half as long, and
/// sm_103's ex2 is twice as fast: docs/kernels/attention_forward_sm100.md has the budget.
std::int32_t polynomial_keys(const Sm100ForwardSpec& spec, const DeviceTraits& device) {
  if (device.compute_capability() != 100) return 0;
  return widest_head_dim(spec) < kWidestHeadDim ? 3 : 2;
}

}  // namespace

std::optional<Refusal> Sm100Forward::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (!is_blackwell(device)) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 10.0 or 10.3", device.major,
                               device.minor)};
  }
  if (auto refusal = refuses_head_dims(f, kWidestHeadDim)) return refusal;
  if (f.is_cached) return Refusal{"keys lie in a cache; this kernel reads tensors"};
  if (has_few_rows(f)) {
    return Refusal{fmt::format(
        "{} rows share a kv head; expected more than {}, fewer leave most of a tile of {} empty",
        f.group * f.seqlen_q, kFewRows, kSm100Groups * kSm100GroupRows)};
  }
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  const Problem& p = f.problem;
  if (f.is_varlen && std::max(f.total_q, p.k.shape[0]) > std::int64_t{0x7fffffff})
    return Refusal{"more than 2^31 packed rows"};
  std::string why = why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}});
  if (!why.empty()) return Refusal{why};
  return std::nullopt;
}

Sm100ForwardSpec Sm100Forward::choose(const ForwardProblem& f, const DeviceTraits& device) {
  Sm100ForwardSpec spec;
  static_cast<ForwardSpec&>(spec) = common_spec(f);
  spec.has_padded_head_dim = false;  // whoever loads pads
  spec.head_dim_qk = std::max(spec.head_dim_qk, kOnePanel);
  spec.head_dim_v = std::max(spec.head_dim_v, kOnePanel);
  spec.tile_q = kSm100Groups * kSm100GroupRows;
  spec.tile_kv = kTileKv;
  spec.num_warps = 4 * (kSm100Groups + 1);
  spec.ctas_per_sm = 1;
  spec.q_stages = 1;
  spec.is_dynamic = has_mask(f) || f.is_varlen;  // row tiles of unequal length
  spec.polynomial_keys = polynomial_keys(spec, device);
  spec.stages = kMostStages;
  while (spec.stages > kFewestStages &&
         sm100_forward_layout(spec).bytes > device.shared_bytes_per_cta)
    --spec.stages;
  return spec;
}

std::vector<Sm100ForwardSpec> Sm100Forward::alternatives(const ForwardProblem& f,
                                                         const DeviceTraits& device) {
  return {choose(f, device)};
}

bool Sm100Forward::reads(const AttentionForward& args, const GrownCache* cache) {
  const Operands tensors(args, cache);
  return have_tensor_maps({&tensors.q, &tensors.k, &tensors.v});
}

std::size_t Sm100Forward::shared_bytes(const Sm100ForwardSpec& spec) {
  return static_cast<std::size_t>(sm100_forward_layout(spec).bytes);
}

std::size_t Sm100Forward::scratch_bytes(const Sm100ForwardSpec& spec, const ForwardProblem& f) {
  return Sm90Forward::scratch_bytes(spec, f);
}

Sm90Launch Sm100Forward::prepare(const ForwardProblem& problem, const ForwardPlan& plan,
                                 const AttentionForward& args, const GrownCache* cache,
                                 void* workspace, const TensorMapEncoder& encode) {
  const Operands tensors(args, cache);
  const auto& spec = plan.spec.as<Sm100ForwardSpec>();
  Sm90Launch launch = persistent_launch(spec, problem, plan, args, cache, workspace);
  if (launch.common.grid.x == 0) return launch;
  const std::int32_t panel = sm90_panel_elements(spec);
  launch.params.q = tensor_map(encode, tensors.q, kSm100GroupRows, panel);
  launch.params.k = tensor_map(encode, tensors.keys_or_queries(tensors.k), spec.tile_kv, panel);
  launch.params.v = tensor_map(encode, tensors.keys_or_queries(tensors.v), spec.tile_kv, panel);
  return launch;
}

}  // namespace fovea::cuda
