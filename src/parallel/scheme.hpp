// How a scheme divides the heads of a problem among ranks, or why it cannot.
#pragma once

#include <cstdint>
#include <string>

#include "parallel/shard_plan.hpp"

namespace fovea::parallel {

struct HeadDivision {
  int head_ranks = 1;           // ranks of a group, each a part of the heads
  std::int64_t head_parts = 1;  // in which keys are gathered
  std::string refusal{};        // in words; empty: the scheme can serve the problem
};

HeadDivision divide_heads(const Shape& shape, int world_size, ParallelScheme scheme,
                          const ShardOptions& options);

}  // namespace fovea::parallel
