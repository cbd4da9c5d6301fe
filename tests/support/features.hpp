// Everything that a problem may have beyond plain attention, as a table: tests take its rows alone
// and in pairs.
#pragma once

#include <ostream>
#include <span>
#include <string_view>

#include "support/case.hpp"

namespace fovea::testing {

struct Feature {
  std::string_view name;
  std::string_view group;  // two of one group exclude each other; empty: goes with all
  void (*add)(Case& problem);
  bool is_long = false;  // many scores: only where they are cheap
};

inline void PrintTo(const Feature& feature, std::ostream* stream) { *stream << feature.name; }

/// Those that change shapes come first: programs capture tensors of the case's shape.
std::span<const Feature> features();

/// Two tiles of 128 keys, the second cut; fewer queries than any panel has lanes, so that heads
/// share panels.
Case plain_case(Dtype dtype);

}  // namespace fovea::testing
