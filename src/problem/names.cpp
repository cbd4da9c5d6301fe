#include <algorithm>
#include <array>

#include "fovea/problem.hpp"

namespace fovea {
namespace {

constexpr std::array<std::string_view, 9> kCpuTargets = {"auto",   "scalar",      "avx2",
                                                         "avx512", "avx512_bf16", "amx_bf16",
                                                         "neon",   "avx512_vnni", "avx_vnni"};

constexpr std::array<std::string_view, 3> kCompileModes = {"auto", "complete", "staged"};

}  // namespace

std::string_view name(CompileMode mode) { return kCompileModes[static_cast<std::size_t>(mode)]; }

std::optional<CompileMode> parse_compile_mode(std::string_view name) {
  const auto* const found = std::ranges::find(kCompileModes, name);
  if (found == kCompileModes.end()) return std::nullopt;
  return static_cast<CompileMode>(found - kCompileModes.begin());
}

std::string_view name(CpuTarget target) { return kCpuTargets[static_cast<std::size_t>(target)]; }

std::optional<CpuTarget> parse_cpu_target(std::string_view name) {
  const auto* const found = std::ranges::find(kCpuTargets, name);
  if (found == kCpuTargets.end()) return std::nullopt;
  return static_cast<CpuTarget>(found - kCpuTargets.begin());
}

}  // namespace fovea
