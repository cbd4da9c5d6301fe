// The options of context parallelism: how many ranks, by which scheme, at what speeds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "fovea/parallel.hpp"

namespace fovea::tools {

class CommandLine;

struct ShardingOptions {
  std::optional<int> num_ranks;
  ParallelScheme scheme = ParallelScheme::all_gather;
  RankSpeed speed{};
  std::string given;  // the last of these options that says nothing without num_ranks
};

/// --ranks and --scheme.
void add_rank_options(CommandLine& line, ShardingOptions& options);
/// --rank-tflops and --rank-gbps, what predictions are made of.
void add_speed_options(CommandLine& line, ShardingOptions& options);
/// After the line was read.
void refuse_without_ranks(const ShardingOptions& options);

}  // namespace fovea::tools
