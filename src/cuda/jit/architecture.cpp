#include "cuda/jit/architecture.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "core/check.hpp"

namespace fovea::cuda::jit {
namespace {

// Of LLVM's release notes; ROCm 6.0 has clang 17, 6.2 clang 18, 7.0 clang 20. Below that of ROCm 6 clang alone says
// nothing of a target: distributions join it with a library of ROCm whose own list is older (Debian 12: clang 15, which
// knows gfx1100, and ROCm 5.2, which does not).
constexpr std::array kAmdTargets{
    AmdTarget{.gfx = 0x90a, .first_clang = 13},   // CDNA2: MI200
    AmdTarget{.gfx = 0x942, .first_clang = 17},   // CDNA3: MI300
    AmdTarget{.gfx = 0x950, .first_clang = 20},   // CDNA4: MI350
    AmdTarget{.gfx = 0x1100, .first_clang = 17},  // RDNA3: RX 7900
    AmdTarget{.gfx = 0x1201, .first_clang = 18},  // RDNA4: RX 9070
};

/// The whole of `digits` as a number to this base, or -1.
int number_of(std::string_view digits, int base) {
  int number = 0;
  const char* const last = digits.data() + digits.size();
  const auto [end, error] = std::from_chars(digits.data(), last, number, base);
  return error == std::errc() && end == last ? number : -1;
}

Architecture parse_amd(std::string_view text, const std::string& where) {
  constexpr int kHexadecimal = 16;
  const int gfx = number_of(text.substr(3), kHexadecimal);
  if (std::ranges::find(kAmdTargets, gfx, &AmdTarget::gfx) == kAmdTargets.end())
    invalid(where, fmt::format("architecture is '{}'; expected {}", text, amd_target_names()));
  return {.major = 0, .minor = 0, .gfx = gfx};
}

}  // namespace

std::string Architecture::name() const {
  if (is_amd()) return fmt::format("gfx{:x}", gfx);
  return "sm_" + std::to_string(10 * major + minor) + (major >= 9 ? "a" : "");
}

Architecture parse_architecture(std::string_view text, const std::string& where) {
  if (text.starts_with("gfx")) return parse_amd(text, where);
  std::string_view digits = text;
  if (digits.starts_with("sm_")) digits.remove_prefix(3);
  if (digits.ends_with('a')) digits.remove_suffix(1);
  const int number = number_of(digits, 10);
  const Architecture architecture{.major = number / 10, .minor = number % 10};
  if (number < 0 || architecture < kOldestArchitecture || number > 999) {
    invalid(where, "architecture is '" + std::string(text) +
                       "'; expected sm_75 or later, as in sm_75, sm_80, sm_90a, or " +
                       amd_target_names());
  }
  return architecture;
}

std::span<const AmdTarget> amd_targets() { return kAmdTargets; }

std::string amd_target_names() {
  std::string names;
  for (std::size_t i = 0; i < kAmdTargets.size(); ++i) {
    if (i > 0) names += i + 1 == kAmdTargets.size() ? " or " : ", ";
    names += Architecture{.major = 0, .minor = 0, .gfx = kAmdTargets[i].gfx}.name();
  }
  return names;
}

}  // namespace fovea::cuda::jit
