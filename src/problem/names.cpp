#include <algorithm>
#include <array>

#include "fovea/problem.hpp"

namespace fovea {
namespace {

constexpr std::array<std::string_view, 9> kCpuTargets = {"auto",   "scalar",      "avx2",
                                                         "avx512", "avx512_bf16", "amx_bf16",
                                                         "neon",   "avx512_vnni", "avx_vnni"};

}  // namespace

std::string_view name(CpuTarget target) { return kCpuTargets[static_cast<std::size_t>(target)]; }

std::optional<CpuTarget> parse_cpu_target(std::string_view name) {
  const auto* const found = std::ranges::find(kCpuTargets, name);
  if (found == kCpuTargets.end()) return std::nullopt;
  return static_cast<CpuTarget>(found - kCpuTargets.begin());
}

}  // namespace fovea
