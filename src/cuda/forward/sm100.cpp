#include "cuda/forward/sm100.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/forward/sm90_few_rows.hpp"
#include "cuda/params/tensor_maps.hpp"

namespace fovea::cuda {
namespace {

/// Above, tensor memory or shared memory has no room for two groups of rows.
constexpr std::int32_t kWidestOfTwoGroups = 128;
/// Below, rows are padded to whole panels of 64 elements; above, to panels of 32 where two groups have room for them.
constexpr std::int32_t kOnePanel = 64;
constexpr std::int32_t kTileKv = 128;
/// More buffers of keys and values than these have nothing to hide.
constexpr std::int32_t kMostStages = 4;

/// Of each 16. On sm_100 ex2 and fmas share a softmax evenly with six, which pays where products take less time, or
/// wait for it (a group alone); with four it takes three quarters of what products of 128 columns do. sm_103's ex2 is
/// twice as fast. docs/kernels/attention_forward_sm100.md has the budget.
std::int32_t polynomial_keys(const Sm100ForwardSpec& spec, const DeviceTraits& device) {
  if (device.compute_capability() != 100) return 0;
  return sm100_groups(spec) > 1 && widest_head_dim(spec) == kWidestOfTwoGroups ? 4 : 6;
}

std::int32_t padded_to_panels(std::int32_t head_dim) {
  return static_cast<std::int32_t>(panels_of(head_dim));
}

/// Two, unless there is room, or work, for one alone.
std::int32_t num_groups(const Sm100ForwardSpec& spec, const ForwardProblem& f) {
  const bool has_room = widest_head_dim(spec) <= kWidestOfTwoGroups;
  return has_room && f.seqlen_q > kSm100GroupRows ? kSm100MostGroups : 1;
}

Sm100ForwardSpec with_groups(Sm100ForwardSpec spec, std::int32_t groups) {
  spec.tile_q = groups * kSm100GroupRows;
  spec.num_warps = 4 * (groups + 1);
  spec.q_stages = 1;
  return spec;
}

/// Of one group: heads share its rows, splits of keys go to CTAs.
Sm100ForwardSpec of_few_rows(Sm100ForwardSpec spec, const ForwardProblem& f,
                             const DeviceTraits& device) {
  static_cast<Sm90ForwardSpec&>(spec) = with_few_rows(spec, f, device);
  return with_groups(spec, 1);
}

Sm100ForwardSpec of_many_rows(Sm100ForwardSpec spec, const ForwardProblem& f) {
  spec.is_dynamic = has_mask(f) || f.is_varlen || f.is_cached;  // row tiles of unequal length
  return with_groups(spec, num_groups(spec, f));
}

}  // namespace

std::optional<Refusal> Sm100Forward::refuses(const ForwardProblem& f, const DeviceTraits& device) {
  if (auto refusal = refuses_tensor_cores(f, device)) return refusal;
  if (!device.has_tensor_memory()) {
    return Refusal{fmt::format("compute capability is {}.{}; expected 10.0 or 10.3", device.major,
                               device.minor)};
  }
  if (auto refusal = refuses_few_queries(f)) return refusal;
  if (auto refusal = refuses_cache_tiles(f)) return refusal;
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  const Problem& p = f.problem;
  const std::int64_t packed_keys = f.is_cached ? 0 : p.k.shape[0];
  if (f.is_varlen && std::max(f.total_q, packed_keys) > std::int64_t{0x7fffffff})
    return Refusal{"more than 2^31 packed rows"};
  std::string why = why_no_tensor_maps({{"q", &p.q}, {"k", &p.k}, {"v", &p.v}});
  if (!why.empty()) return Refusal{why};
  return has_few_rows(f) ? refuses_few_rows(f) : std::nullopt;
}

Sm100ForwardSpec Sm100Forward::choose(const ForwardProblem& f, const DeviceTraits& device) {
  Sm100ForwardSpec spec;
  static_cast<ForwardSpec&>(spec) = common_spec(f);
  spec.has_padded_head_dim = false;  // whoever loads pads
  spec.head_dim_qk = std::max(spec.head_dim_qk, kOnePanel);
  spec.head_dim_v = std::max(spec.head_dim_v, kOnePanel);
  if (has_few_rows(f) || widest_head_dim(spec) > kWidestOfTwoGroups) {
    spec.head_dim_qk = padded_to_panels(spec.head_dim_qk);
    spec.head_dim_v = padded_to_panels(spec.head_dim_v);
  }
  spec.ctas_per_sm = 1;
  spec.is_cached = f.is_cached;
  spec = has_few_rows(f) ? of_few_rows(spec, f, device) : of_many_rows(spec, f);
  spec.tile_kv = kTileKv;
  spec.polynomial_keys = polynomial_keys(spec, device);
  spec.stages = kMostStages;
  while (sm100_forward_layout(spec).bytes > device.shared_bytes_per_cta) --spec.stages;
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
  place_tensor_maps(spec, kSm100GroupRows, tensors, encode, launch.params);
  return launch;
}

}  // namespace fovea::cuda
