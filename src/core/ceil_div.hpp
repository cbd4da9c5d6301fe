// How many parts of a size cover a length, and how long they are together.
#pragma once

#include <cstdint>

namespace fovea {

/// a / b, rounded up; neither below 0, b above.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The least multiple of b that is not below a; neither below 0, b above.
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

}  // namespace fovea
