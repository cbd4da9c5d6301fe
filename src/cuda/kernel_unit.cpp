#include "cuda/kernel_unit.hpp"

#include <fmt/format.h>

namespace fovea::cuda {

std::string kernel_unit(const expr::CudaProgram& program, const KernelUnit& unit) {
  return fmt::format(
      "#include \"{}\"\n#include \"{}\"\n"
      "namespace fovea::cuda {{\n{}\n{}}}\n"
      "extern \"C\" __global__ void __launch_bounds__({}) {}("
      "const __grid_constant__ fovea::cuda::{} p) {{\n"
      "  fovea::cuda::{}(p);\n}}\n",
      unit.header, program.include, program.mods, unit.spec, unit.bounds, jit::kEntryName,
      unit.params, unit.call);
}

jit::KernelText common_kernel(std::string_view name, std::string_view params, int num_threads) {
  return {.unit = fmt::format("#include \"common/{0}.cuh\"\n"
                              "extern \"C\" __global__ void __launch_bounds__({1})\n"
                              "{2}(const __grid_constant__ fovea::cuda::{3} p) {{\n"
                              "  fovea::cuda::{0}(p);\n"
                              "}}\n",
                              name, num_threads, jit::kEntryName, params),
          .label = fmt::format("common/{}", name)};
}

std::string launch_bounds(int num_warps, int ctas_per_sm, const DeviceTraits& device) {
  const int threads = num_warps * device.warp_lanes;
  if (!device.is_amd()) return fmt::format("{}, {}", threads, ctas_per_sm);
  constexpr int kSimdsOfCu = 4;
  const int waves = num_warps * ctas_per_sm / kSimdsOfCu;
  return waves > 1 ? fmt::format("{}, {}", threads, waves) : fmt::format("{}", threads);
}

}  // namespace fovea::cuda
