// sm90/attention_forward where a mask selects pieces of the score matrix by a table (expr/position_steps.hpp), finer
// than its usual tiles: tiles of such pieces, so that each is visited whole or not at all. With pieces of 64 rows a
// warpgroup has a CTA and a walk of its own, and an SM two or three of them. docs/kernels/attention_forward_sm90.md has
// the bound.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/forward/candidates.hpp"

namespace fovea::cuda {

/// Does the problem ask for other tiles than `usual`, which the kernel has for many rows?
bool has_selections(const ForwardProblem& problem, const Sm90ForwardSpec& usual);

/// `usual` with tiles that pieces of the problem's selections are made of.
Sm90ForwardSpec with_selections(const Sm90ForwardSpec& usual, const ForwardProblem& problem);
std::vector<Sm90ForwardSpec> selections_alternatives(const Sm90ForwardSpec& chosen,
                                                     const DeviceTraits& device);

/// Of a grid of so many CTAs: Sm90ForwardParams::claims_of_wave.
std::int32_t claims_of_wave(const Sm90ForwardSpec& spec, const ForwardProblem& problem,
                            const DeviceTraits& device, std::uint32_t num_ctas);

}  // namespace fovea::cuda
