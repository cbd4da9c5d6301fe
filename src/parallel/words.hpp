// Numbers of plans and forecasts as people read them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace fovea::parallel {

inline std::string bytes_in_words(std::int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value >= 1e9) return fmt::format("{:.2f} GB", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f} MB", value / 1e6);
  return fmt::format("{:.1f} kB", value / 1e3);
}

}  // namespace fovea::parallel
