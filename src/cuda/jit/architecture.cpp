#include "cuda/jit/architecture.hpp"

#include <charconv>

#include "core/check.hpp"

namespace fovea::cuda::jit {

std::string Architecture::name() const {
  return "sm_" + std::to_string(10 * major + minor) + (major >= 9 ? "a" : "");
}

Architecture parse_architecture(std::string_view text, const std::string& where) {
  std::string_view digits = text;
  if (digits.starts_with("sm_")) digits.remove_prefix(3);
  if (digits.ends_with('a')) digits.remove_suffix(1);
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  const Architecture architecture{number / 10, number % 10};
  if (!is_number || architecture < kOldestArchitecture || number > 999) {
    invalid(where, "architecture is '" + std::string(text) +
                       "'; expected sm_75 or later, as in sm_75, sm_80, sm_90a");
  }
  return architecture;
}

}  // namespace fovea::cuda::jit
