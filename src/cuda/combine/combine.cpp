#include "cuda/combine/combine.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/kernel_unit.hpp"
#include "cuda/spec_text.hpp"

namespace fovea::cuda {

template <>
struct SpecText<CombineSpec> {
  static constexpr std::string_view kName = "CombineSpec";
  using Base = void;
  static constexpr std::tuple kMembers{
      FOVEA_SPEC_MEMBER(CombineSpec, out_element), FOVEA_SPEC_MEMBER(CombineSpec, wants_row_max),
      FOVEA_SPEC_MEMBER(CombineSpec, is_chained),  FOVEA_SPEC_MEMBER(CombineSpec, has_packed_q),
      FOVEA_SPEC_MEMBER(CombineSpec, most_splits), FOVEA_SPEC_MEMBER(CombineSpec, has_groups),
      FOVEA_SPEC_MEMBER(CombineSpec, takes_groups)};
};

namespace {

/// From so many rows on they come in waves: measured on an H200 (docs/kernels/decode_sm90.md).
constexpr std::int64_t kRowsOfWaves = 2048;
/// On each SM, where rows are more than warps and most may be done: the fewer warps the sooner all have left.
constexpr int kWarpsOfManyRows = 24;

}  // namespace

const CombineForm& wide_form(bool takes_groups) {
  return takes_groups ? kGroupsCombine : kWideCombine;
}

const CombineForm& combine_form(std::int64_t num_rows, std::int32_t max_splits, bool takes_groups) {
  const bool is_deep = num_rows < kRowsOfWaves && max_splits > kWideCombine.splits_at_once;
  return is_deep ? kDeepCombine : wide_form(takes_groups);
}

jit::KernelText combine_text(const CombineSpec& spec, const CombineForm& form,
                             const DeviceTraits& device) {
  // Folding takes registers, and so do packed rows of a form with few for each: a CTA less has them.
  const bool is_narrow =
      spec.takes_groups && spec.has_packed_q && form.role != KernelRole::deep_combine;
  const int ctas_per_sm = form.ctas_per_sm - (spec.has_groups ? 1 : 0) - (is_narrow ? 1 : 0);
  return {fmt::format("#include \"common/combine.cuh\"\n"
                      "namespace fovea::cuda {{\n{}}}\n"
                      "extern \"C\" __global__ void __launch_bounds__({}) {}("
                      "const __grid_constant__ fovea::cuda::CombineParams p) {{\n"
                      "  fovea::cuda::combine<fovea::cuda::spec, {}>(p);\n}}\n",
                      print_spec(spec), launch_bounds(form.num_warps, ctas_per_sm, device),
                      jit::kEntryName, form.splits_at_once),
          fmt::format("common/combine {} at once{}", form.splits_at_once,
                      spec.is_chained ? " chained" : "")};
}

KernelLaunch combine_launch(const CombineParams& params, const CombineForm& form, bool is_chained,
                            const DeviceTraits& device) {
  KernelLaunch launch = kernel_launch(form.role, params);
  launch.grid.x = static_cast<unsigned>((params.num_rows + form.num_warps - 1) / form.num_warps);
  if (params.tiles_of_cta > 0) {
    const int at_once = form.ctas_per_sm - 1;
    const int of_many = std::min(at_once, kWarpsOfManyRows / form.num_warps);
    if (launch.grid.x > static_cast<unsigned>(at_once * device.num_sms))
      launch.grid.x = static_cast<unsigned>(of_many * device.num_sms);
  }
  launch.num_threads = static_cast<unsigned>(form.num_warps * device.warp_lanes);
  launch.is_pdl = is_chained;
  return launch;
}

}  // namespace fovea::cuda
