// How many parts of a size cover a length.
#pragma once

#include <cstdint>

namespace fovea {

/// a / b, rounded up; neither below 0, b above.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace fovea
