#include "cuda/forward/sm100_fp4.hpp"

#include <fmt/format.h>

#include "cuda/forward/launch.hpp"
#include "cuda/forward/quantize_kv.hpp"
#include "cuda/forward/quantized_recipe.hpp"

namespace fovea::cuda {
namespace {

/// Of 20 KB at head_dim 128: more have nothing to hide behind a softmax of some 1,000 clocks.
constexpr std::int32_t kStages = 4;

Sm100Fp4Spec with_groups(const ForwardProblem& f, std::int32_t groups) {
  Sm100Fp4Spec spec;
  static_cast<ForwardSpec&>(spec) = common_spec(f);
  spec.head_dim_qk = fp4_head_dim(f.head_dim_qk);
  spec.head_dim_v = fp4_head_dim(f.head_dim_v);
  spec.has_padded_head_dim = false;  // codes are padded in memory
  spec.scale_group = fp4_group(f.problem.quant);
  spec.is_dynamic = has_mask(f) || f.is_varlen;  // row tiles of unequal length
  spec.tile_q = groups * kSm100GroupRows;
  spec.tile_kv = kQuantizedTile;
  spec.num_warps = 4 * (groups + 1);
  spec.stages = kStages;
  spec.ctas_per_sm = 1;
  return spec;
}

/// Where records begin: behind what the roles have in workspace.
std::size_t records_at(const Sm100Fp4Spec& spec, const ForwardProblem& f) {
  return part_bytes(static_cast<std::int64_t>(Sm90Forward::scratch_bytes(spec, f)));
}

}  // namespace

std::optional<Refusal> Sm100ForwardFp4::refuses(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  if (auto refusal = refuses_recipe_of_four_bits(f.problem.quant)) return refusal;
  if (!device.has_tensor_memory()) {
    return Refusal{fmt::format(
        "quant.qk is e2m1 and compute capability {}.{}; expected 10.0 or 10.3, whose tensor memory "
        "has scales",
        device.major, device.minor)};
  }
  if (auto refusal = refuses_four_bits(f, device)) return refusal;
  if (f.seqlen_kv >= std::int64_t{1} << 28) return Refusal{"more than 2^28 keys"};
  return std::nullopt;
}

Sm100Fp4Spec Sm100ForwardFp4::choose(const ForwardProblem& f, const DeviceTraits&) {
  return with_groups(f, f.seqlen_q > kSm100GroupRows ? kSm100MostGroups : 1);
}

std::vector<Sm100Fp4Spec> Sm100ForwardFp4::alternatives(const ForwardProblem& f,
                                                        const DeviceTraits&) {
  return {with_groups(f, kSm100MostGroups), with_groups(f, 1)};
}

Fp4RoundingSpec Sm100ForwardFp4::rounding_spec(const Sm100Fp4Spec& spec) {
  return fp4_rounding_spec(spec, spec.scale_group, true);
}

std::size_t Sm100ForwardFp4::shared_bytes(const Sm100Fp4Spec& spec) {
  return static_cast<std::size_t>(sm100_fp4_layout(spec).bytes);
}

std::size_t Sm100ForwardFp4::scratch_bytes(const Sm100Fp4Spec& spec, const ForwardProblem& f) {
  return records_at(spec, f) + fp4_bytes(rounding_spec(spec), f);
}

Sm100Fp4Launch Sm100ForwardFp4::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                        const AttentionForward& args, const GrownCache* cache,
                                        void* workspace, const TensorMapEncoder&) {
  const auto& spec = plan.spec.as<Sm100Fp4Spec>();
  Sm100Fp4Launch launch;
  launch.roles = persistent_launch(spec, f, plan, args, cache, workspace);
  if (launch.roles.num_ctas == 0) return launch;
  launch.rounding = fp4_rounding_launch(rounding_spec(spec), f, launch.roles.common.params,
                                        static_cast<std::byte*>(workspace) + records_at(spec, f));
  static_cast<Sm90ForwardParams&>(launch.params) = launch.roles.params;
  launch.params.operands = launch.rounding.params.results;
  return launch;
}

KernelLaunches Sm100Fp4Launch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  if (roles.num_ctas == 0) return all;
  roles.add_before(all);
  rounding.add_to(all);
  KernelLaunch main = roles.common.main_launch(plan, params);
  main.grid = {.x = roles.num_ctas};
  main.is_pdl = true;
  all.add(main);
  return all;
}

}  // namespace fovea::cuda
