// Whole problems drawn from a number: every feature, layout, dtype and operation, in shapes that meet the edges of
// tiles.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "support/cache_case.hpp"
#include "support/gradient_case.hpp"

namespace fovea::testing {

enum class Operation : std::uint8_t { forward, backward, jvp, decode };

struct RandomProblem {
  Operation operation = Operation::forward;
  GradientCase dense{};               // of forward its first member
  CacheCase cache{};                  // of decode
  std::optional<CpuTarget> target{};  // default: all
  std::optional<Lengths> longest{};   // of forward: bounds of its plan; default: none
  int num_threads = 1;
};

/// The same problem for the same number, on machines with the same targets.
RandomProblem random_problem(std::uint64_t number);

/// Empty where the operation equals the oracle, element by element; else what differs, and in which problem.
std::string difference_from_oracle(const RandomProblem& problem);

}  // namespace fovea::testing
