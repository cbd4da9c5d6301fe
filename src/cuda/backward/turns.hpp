// Walks of owners of keys that take turns at adding to dq, so that its bits are the same at every run: what all kernels
// that do so ask of a problem. device/sm90/backward/turns.cuh has the idea.
#pragma once

#include <cstdint>

#include "problem/forward.hpp"

namespace fovea::cuda {

/// Positions of walks over queries are counted up to here.
inline constexpr std::int64_t kMostPositions = std::int64_t{1} << 28;

/// Every tile of keys visits every tile of queries, and there are some that would wait for each other (StaggeredWalk).
bool is_staggered(const ForwardProblem& problem, std::int64_t tile_kv, std::int64_t tile_q);

/// (batch, head) pairs of a section, measured: docs/kernels/attention_backward_sm90.md. `fitting`: whose queries and
/// dout the L2 cache holds; sums of dq take as much again.
std::int32_t pairs_of_section(std::int32_t fitting, bool is_deterministic, bool has_mask);

}  // namespace fovea::cuda
