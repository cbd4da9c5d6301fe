#include "cuda/forward/sm120_fp4.hpp"

#include <fmt/format.h>

#include "cuda/forward/quantized_recipe.hpp"

namespace fovea::cuda {
namespace {

constexpr std::int32_t kStages = 3;
/// Rows of a CTA, 16 for each warp: read K and V half as often; or two CTAs of an SM, whose softmaxes are no more in
/// step.
constexpr std::int32_t kRows = 128, kFewerRows = 64;

bool has_products_of_four_bits(const DeviceTraits& device) {
  return !device.is_amd() &&
         (device.compute_capability() == 120 || device.compute_capability() == 121);
}

Fp4ForwardSpec with_rows(const ForwardProblem& f, std::int32_t rows) {
  Fp4ForwardSpec spec{common_spec(f)};
  spec.head_dim_qk = fp4_head_dim(f.head_dim_qk);
  spec.head_dim_v = fp4_head_dim(f.head_dim_v);
  spec.has_padded_head_dim = spec.head_dim_v != f.head_dim_v;  // codes are padded in memory
  spec.group = fp4_group(f.problem.quant);
  spec.tile_q = rows;
  spec.tile_kv = kQuantizedTile;
  spec.num_warps = rows / 16;
  spec.stages = rows == kRows ? kStages : kStages - 1;
  spec.ctas_per_sm = rows == kRows ? 1 : 2;
  return spec;
}

}  // namespace

std::optional<Refusal> Sm120ForwardFp4::refuses(const ForwardProblem& f,
                                                const DeviceTraits& device) {
  if (auto refusal = refuses_recipe_of_four_bits(f.problem.quant)) return refusal;
  if (!has_products_of_four_bits(device)) {
    return Refusal{fmt::format(
        "quant.qk is e2m1 and compute capability {}.{}; expected 12.0 or 12.1, whose warps "
        "multiply four bits",
        device.major, device.minor)};
  }
  if (auto refusal = refuses_four_bits(f, device)) return refusal;
  return refuses_margin(f);
}

Fp4ForwardSpec Sm120ForwardFp4::choose(const ForwardProblem& f, const DeviceTraits& device) {
  const Fp4ForwardSpec spec = with_rows(f, kRows);
  const bool fills = num_row_tiles(spec, f, f.seqlen_q, f.total_q) >= device.num_sms;
  return fills ? spec : with_rows(f, kFewerRows);
}

std::vector<Fp4ForwardSpec> Sm120ForwardFp4::alternatives(const ForwardProblem& f,
                                                          const DeviceTraits&) {
  return {with_rows(f, kRows), with_rows(f, kFewerRows)};
}

Fp4RoundingSpec Sm120ForwardFp4::rounding_spec(const Fp4ForwardSpec& spec) {
  return fp4_rounding_spec(spec, spec.group, false);
}

std::size_t Sm120ForwardFp4::shared_bytes(const Fp4ForwardSpec& spec) {
  return static_cast<std::size_t>(fp4_layout(spec).bytes);
}

std::size_t Sm120ForwardFp4::scratch_bytes(const Fp4ForwardSpec& spec, const ForwardProblem& f) {
  return fp4_bytes(rounding_spec(spec), f);
}

Fp4Launch Sm120ForwardFp4::prepare(const ForwardProblem& f, const ForwardPlan& plan,
                                   const AttentionForward& args, const GrownCache* cache,
                                   void* workspace, const TensorMapEncoder&) {
  const auto& spec = plan.spec.as<Fp4ForwardSpec>();
  Fp4Launch launch;
  launch.common = forward_launch(f, plan, args, workspace, cache);
  place_range_tables(plan, workspace, launch.common);
  launch.rounding = fp4_rounding_launch(rounding_spec(spec), f, launch.common.params, workspace);
  launch.params = {.common = launch.common.params, .operands = launch.rounding.params.results};
  return launch;
}

KernelLaunches Fp4Launch::launches(const ForwardPlan& plan) const {
  KernelLaunches all;
  common.add_tables(all);
  rounding.add_to(all);
  all.add(common.main_launch(plan, params));
  return all;
}

}  // namespace fovea::cuda
