// Kernels and tiles that a problem can run by on a device: the table's choice, and what a GPU may measure as faster.
// Read candidates.hpp for the table, tuning.hpp for what was measured.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/forward/candidates.hpp"

namespace fovea::cuda {

/// What of a spec is chosen; the rest follows from the problem.
struct TileChoice {
  std::int32_t tile_q = 0, tile_kv = 0, num_warps = 0, stages = 0, q_stages = 0;
  std::int32_t ctas_per_sm = 0, heads_per_tile = 0;
  std::int32_t is_split = 0, is_dynamic = 0, takes_groups = 0;  // 0 or 1

  bool operator==(const TileChoice&) const = default;
};

/// A member by its name, as files and people know it.
struct TileMember {
  std::string_view name;
  std::int32_t TileChoice::*value;
};
std::span<const TileMember> tile_members();

TileChoice tile_of(const AnyForwardSpec& spec);

/// "tile_q=128 tile_kv=64 ...": every member, in one order.
std::string print_tile(const TileChoice& tile);

struct Choice {
  const Candidate* candidate = nullptr;  // of the table
  AnyForwardSpec spec;
};

/// All that can run the problem, each once: the table's choice, its kernel's other tiles, then what other kernels have.
/// Empty where every kernel refuses.
std::vector<Choice> choices_of(const ForwardProblem& problem, const DeviceTraits& device);

}  // namespace fovea::cuda
